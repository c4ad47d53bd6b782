"""The user's cache folder: what takes minutes to build is built once, by one process at a time, and appears whole."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


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


def _build(place: Path, build: Callable[[Path], None]) -> None:
    fresh = Path(tempfile.mkdtemp(dir=place.parent, prefix="."))
    try:
        build(fresh)
        fresh.chmod(0o755)
        fresh.rename(place)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
