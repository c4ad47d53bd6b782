"""The control groups under which a node's kubelet puts its pods; versions 1 and 2."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_ROOT: Final = Path("/sys/fs/cgroup")
_EMPTY_S: Final = 10.0


@contextmanager
def cgroup(name: str) -> Iterator[None]:
    """One group `name` in every hierarchy, removed at the end with all in it. What is in it must be dead by then."""
    roots = [_ROOT] if (_ROOT / "cgroup.controllers").exists() else [each for each in _ROOT.iterdir() if each.is_dir()]
    folders = [root / name for root in roots if not root.is_symlink()]
    for folder in folders:
        _remove(folder)
        folder.mkdir()
        _allow_all_cores(folder)
    try:
        yield
    finally:
        for folder in folders:
            _remove(folder)


def _allow_all_cores(folder: Path) -> None:
    """Version 1's cpuset starts empty, and nothing runs in an empty one."""
    for setting in ("cpuset.cpus", "cpuset.mems"):
        value = folder / setting
        if value.exists() and not (folder / "cgroup.controllers").exists():
            value.write_text((folder.parent / setting).read_text())


def _remove(folder: Path) -> None:
    """The deepest first. The kernel takes a moment to forget dead processes."""
    end_s = time.monotonic() + _EMPTY_S
    for group in sorted((*folder.rglob("*/"), folder), reverse=True):
        while group.is_dir():
            try:
                group.rmdir()
            except OSError:
                if time.monotonic() > end_s:
                    raise
                time.sleep(0.05)  # noqa: TID251 -- nothing announces that a group is empty
