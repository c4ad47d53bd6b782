"""Directories of running programs: their user's alone, and removed by a later start if nobody is left who could have.

The owner holds a lock on the file `owner` in it, which the kernel frees when it dies, SIGKILL included. Child processes that
still need the directory then inherit `lock`, and hold it on.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

_OWNER: Final = "owner"
_RANDOM: Final = "?" * 8  # what mkdtemp puts behind a prefix


class PrivateDirectory(NamedTuple):
    """An existing directory of mode 0700. `lock`: an open file, held until `remove`."""

    path: Path
    lock: int

    def remove(self) -> None:
        """With all that is in it. Only once. Raises OSError if something cannot be removed: a later start tries again."""
        try:
            _remove(self.path)
        finally:
            os.close(self.lock)


def make(parent: str | Path, prefix: str) -> PrivateDirectory:
    """A new one, `<prefix>XXXXXXXX`; before that those in the same place go whose owners are dead. Raises OSError."""
    remove_abandoned(parent, prefix)
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))  # mkdtemp makes it 0700
    unseen = path / f"{_OWNER}.part"  # nobody looks for a lock here before it is held
    lock = os.open(unseen, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.write(lock, f"{os.getpid()}\n".encode())  # for people
    unseen.rename(path / _OWNER)
    return PrivateDirectory(path, lock)


def remove_abandoned(parent: str | Path, prefix: str) -> None:
    """Those of this user that were made by `make` and that no living process holds. What cannot be removed stays."""
    for path in Path(parent).glob(prefix + _RANDOM):
        lock = _abandoned(path)
        if lock is not None:
            with suppress(OSError):
                _remove(path)
            os.close(lock)


def _remove(path: Path) -> None:
    """As much as can go, and `owner` last: a directory without it would be nobody's for ever. OSError: something stays."""
    for entry in list(path.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name != _OWNER:
            entry.unlink(missing_ok=True)
    if left := sorted(entry.name for entry in path.iterdir() if entry.name != _OWNER):
        raise OSError(errno.ENOTEMPTY, f"could not be removed: {', '.join(left)}", str(path))
    shutil.rmtree(path)


def _abandoned(path: Path) -> int | None:
    """Its lock, if nobody has it."""
    try:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return None
        lock = os.open(path / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # not ours, not made here, or gone
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # somebody lives, or this file system has no locks
        os.close(lock)
        return None
    return lock
