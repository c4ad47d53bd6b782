"""The user's cache folder: what takes minutes to build is built once, by one process at a time, and appears whole."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


def folder() -> Path:
    """As the Makefile's CACHE."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "prefixpool", "cluster")


def built(place: Path, build: Callable[[Path], None]) -> Path:
    """`place`; when it is missing, `build` fills an empty folder, which then takes that name."""
    if not place.exists():
        with locked(place.with_name(place.name + ".lock")):
            if not place.exists():
                _build(place, build)
    return place


@contextmanager
def locked(lock: Path) -> Iterator[None]:
    """One process at a time; the kernel frees the lock of a process that dies."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def forget_unused(place: Path, kept_s: float) -> None:
    """`place` is in use from now on. Folders beside it that nobody has used for so long are removed."""
    os.utime(place)
    for folder in place.parent.glob("*/"):
        with suppress(FileNotFoundError):  # others do the same at once, and what is built gets another name
            if time.time() - folder.stat().st_mtime > kept_s:
                shutil.rmtree(folder, ignore_errors=True)


def owned(lock: Path) -> IO[str] | None:
    """The lock, until what is returned is closed or this process dies. None: another process has it."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    handle = lock.open("w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        return None
    return handle


def _build(place: Path, build: Callable[[Path], None]) -> None:
    fresh = Path(tempfile.mkdtemp(dir=place.parent, prefix="."))
    try:
        build(fresh)
        fresh.chmod(0o755)
        fresh.rename(place)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
