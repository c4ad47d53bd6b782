"""What all engines that use a directory agree on: how many bytes its files take, and which of them evicts."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from enum import StrEnum
from pathlib import Path
from typing import Final

_COUNT: Final = struct.Struct("<q")


class Failure(StrEnum):
    """Why a chunk was not read or written. Names of a metric's label."""

    ABSENT = "absent"  # gone, or never there
    CORRUPT = "corrupt"  # not what was written
    UNREADABLE = "unreadable"
    FULL = "full"  # the capacity is used up, and nothing may go
    DISK_FULL = "disk_full"  # the file system's
    READ_ONLY = "read_only"
    DENIED = "denied"
    BROKEN = "broken"  # any other error of the system


class Removal(StrEnum):
    """Why this process removed a chunk. Names of a metric's label."""

    CAPACITY = "capacity"  # of the tier
    FREE_SPACE = "free_space"  # so much is left free for others
    FOREIGN = "foreign"  # another model's, for either of these
    DAMAGED = "damaged"  # not what was written


class StoreError(Exception):
    """A chunk was not read or written."""

    def __init__(self, failure: Failure, words: str) -> None:
        super().__init__(f"{failure}: {words}")
        self.failure = failure


def store_error(error: OSError) -> StoreError:
    """What an error of the system means."""
    kinds = {
        errno.ENOSPC: Failure.DISK_FULL,
        errno.EDQUOT: Failure.DISK_FULL,
        errno.EROFS: Failure.READ_ONLY,
        errno.EACCES: Failure.DENIED,
        errno.EPERM: Failure.DENIED,
    }
    return StoreError(kinds.get(error.errno or 0, Failure.BROKEN), f"{error.filename}: {error.strerror}")


class Ledger:
    """Of one directory, as one process uses it: the file `used` and the lock `collector`."""

    def __init__(self, directory: Path, capacity: int) -> None:
        self._used = directory / "used"
        self._lock = directory / "collector"
        self._capacity = capacity
        self.last = 0  # the count when it was last read or changed: looking at it asks no disk
        self._collector: int | None = None  # descriptor of the lock file, while the lock is ours

    def close(self) -> None:
        """Let another be the collector."""
        if self._collector is not None:
            os.close(self._collector)
            self._collector = None

    def reserve(self, size: int) -> bool:
        """Count so many bytes in, unless that is beyond the capacity. Raises StoreError."""
        return self.count(size, most=self._capacity) >= 0

    def count(self, change: int, most: int | None = None) -> int:
        """Change `used` under its lock; the new count, or -1 and no change if it would be more than `most`."""
        try:
            return self._change(change, most)
        except OSError as error:
            if change > 0:
                raise store_error(error) from error
            return 0  # the collector counts again

    def read(self) -> int:
        """The count, for whoever goes on to change it by what it lacks. Raises StoreError."""
        try:
            return self._change(0, None)
        except OSError as error:
            raise store_error(error) from error

    def _change(self, change: int, most: int | None) -> int:
        descriptor = os.open(self._used, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            raw = os.pread(descriptor, _COUNT.size, 0)
            count = max(0, (_COUNT.unpack(raw)[0] if len(raw) == _COUNT.size else 0) + change)
            if most is not None and count > most:
                return -1
            self.last = count
            if change:
                os.pwrite(descriptor, _COUNT.pack(count), 0)
            return count
        finally:
            os.close(descriptor)

    def in_place(self) -> bool:
        """False: it was deleted, and perhaps made again by others; the lock that is held is of a file that is gone."""
        try:
            found = os.stat(self._lock)
        except OSError:
            return self._collector is None and self._lock.parent.is_dir()
        return self._collector is None or os.fstat(self._collector).st_ino == found.st_ino

    def collects(self) -> bool:
        """This process is the one that evicts, from now on if nobody is."""
        if self._collector is not None:
            return True
        try:
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        self._collector = descriptor
        return True
