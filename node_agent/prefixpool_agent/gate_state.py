"""`gate.state`: the fence and the in-flight counts that all API server processes of an engine and its agent share.

The one reader and writer of that file. 4,096 bytes, mapped: magic (8) | fence u8 | padding to 16 | 254 slots of 16 bytes:
pid u32, inflight u32, total u64. Each process owns one slot, so that counting needs no lock; only claiming and freeing a
slot take a flock. Every store is one aligned machine word through a typed memoryview (struct.pack_into with "<" writes byte
by byte, and another process could see half of it). Little endian, as every host that engines run on.

The supervisor puts a fresh file in place before each engine start: readers open it again when the epoch changes.
Standard library only: the supervisor imports it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final

MAGIC: Final = b"PPGATE01"
SIZE: Final = 4096
SLOTS: Final = 254
_FENCE_AT: Final = 8
_MAX_U32: Final = 0xFFFFFFFF


class GateStateError(Exception):
    """The file is missing, is not a gate state, or has no free slot."""


class GateState:
    """One mapping of the file. Safe to share between threads of one process only for reading."""

    def __init__(self, path: Path) -> None:
        """Raises GateStateError."""
        self.path = path
        self._file = _open(path)
        self._map = mmap.mmap(self._file, SIZE)
        self._bytes = memoryview(self._map)
        self._words = self._bytes.cast("I")
        self._longs = self._bytes.cast("Q")
        self._pids = self._words[4:1020:4]
        self._inflight = self._words[5:1020:4]

    @staticmethod
    def create(path: Path) -> None:
        """Put a fresh zeroed file in place of any old one, which processes that still map it keep."""
        fresh = path.with_name(path.name + ".new")
        fresh.unlink(missing_ok=True)
        descriptor = os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(MAGIC.ljust(SIZE, b"\0"))
        fresh.replace(path)

    def __enter__(self) -> GateState:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Unmap. Slots of this process stay claimed until `reap()` sees the process gone, or `Slot.release()`."""
        for view in (self._pids, self._inflight, self._words, self._longs, self._bytes):
            view.release()
        self._map.close()
        os.close(self._file)

    @property
    def fenced(self) -> bool:
        return self._bytes[_FENCE_AT] != 0

    def fence(self, on: bool) -> None:
        """Refuse new requests in all API server processes at once, or accept them again."""
        self._bytes[_FENCE_AT] = 1 if on else 0

    def inflight(self) -> int:
        """Requests inside the gate, all processes together. Slots of crashed processes count until `reap()`."""
        return sum(self._inflight)

    def total(self) -> int:
        """Requests admitted since the engine's start; never falls while the epoch lasts."""
        return sum(self._longs[3 : 3 + 2 * SLOTS : 2])

    def pids(self) -> list[int]:
        """API server processes that have started to serve."""
        return [pid for pid in self._pids if pid]

    def claim(self, pid: int) -> Slot:
        """A slot of one's own. Raises GateStateError if all are taken by living processes."""
        self.reap()
        with self._locked():
            for index, owner in enumerate(self._pids):
                if owner == 0:
                    self._inflight[index] = 0
                    self._pids[index] = pid
                    return Slot(self, index)
        raise GateStateError(f"{self.path}: all {SLOTS} slots belong to living processes")

    def reap(self) -> int:
        """Free the slots of processes that are gone; how many requests went with them."""
        lost = 0
        with self._locked():
            for index, pid in enumerate(self._pids):
                if pid and not _alive(pid):
                    lost += self._inflight[index]
                    self._inflight[index] = 0
                    self._pids[index] = 0
        return lost

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


class Slot:
    """The counts of one process; only that process changes them."""

    __slots__ = ("_index", "_state")

    def __init__(self, state: GateState, index: int) -> None:
        self._state = state
        self._index = index

    def enter(self) -> None:
        """Count a request before deciding about it, so that a fence set meanwhile is seen either here or there."""
        self._state._inflight[self._index] = min(self._state._inflight[self._index] + 1, _MAX_U32)

    def leave(self) -> None:
        """The counterpart of `enter`."""
        self._state._inflight[self._index] = max(self._state._inflight[self._index] - 1, 0)

    def admitted(self) -> None:
        """Count a request that was let in."""
        self._state._longs[3 + 2 * self._index] += 1

    def release(self) -> None:
        """Give the slot back."""
        self._state._inflight[self._index] = 0
        self._state._pids[self._index] = 0


def _open(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise GateStateError(f"{path}: {error.strerror}") from error
    if os.fstat(descriptor).st_size != SIZE or os.pread(descriptor, len(MAGIC), 0) != MAGIC:
        os.close(descriptor)
        raise GateStateError(f"{path}: not a gate state file")
    return descriptor


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
