"""Chunks as files of one directory: look, read, write, evict, count. Called from I/O threads; `holds` from anywhere.

    <directory>/<namespace>/<2 hex digits>/<key in hex>.kv       a chunk; its time is when it was last used
                            <2 hex digits>/<key>.<writer>.tmp    being written; appears under its name whole or not at all
    <directory>/collector                                        locked by the one process that evicts
    <directory>/used                                             bytes of all files, changed under its lock by all writers

Several engines may use one directory, with one model or several. All count into `used` before they write, so that together
they stay within the capacity; a process killed in between leaves a count too high, which the collector puts right when it
counts again. Only the collector removes chunks that nobody found to be bad, of whatever model. Files may be removed by
anybody at any time: what is gone is a miss.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

from prefixpool_agent.tiers import chunk_file
from prefixpool_agent.tiers.chunk_file import HEAD_BYTES, NAMESPACE_BYTES, ChunkError, Head
from prefixpool_agent.tiers.tally import Tally
from prefixpool_agent.tiers.trail import Place
from prefixpool_agent.tiers.worth import Ranking

SUFFIX: Final = ".kv"
TEMPORARY: Final = ".tmp"
ABANDONED_S: Final = 300.0  # nobody writes a chunk for so long: its writer is dead
LOW_WATER: Final = 0.95  # of the capacity: the collector evicts down to there, not file by file
REMEMBERED: Final = 65_536  # evicted chunks
_COUNT: Final = struct.Struct("<q")
_log = logging.getLogger(__name__)


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


class StoreError(Exception):
    """A chunk was not read or written."""

    def __init__(self, failure: Failure, words: str) -> None:
        super().__init__(f"{failure}: {words}")
        self.failure = failure


class Limits(NamedTuple):
    """Bytes."""

    capacity: int  # all files of the directory
    free: int  # left on the file system for others
    shared: bool  # other engines use the directory, too


class DiskStore:
    """One engine's view of the directory. Inside, a chunk is known by namespace and key together."""

    def __init__(
        self,
        directory: Path,
        namespace: bytes,
        limits: Limits,
        seconds: Callable[[int], float],
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`seconds`: to compute a chunk that ends at so many tokens of a prompt; only proportions count."""
        self._directory = directory
        self._namespace = namespace
        self._limits = limits
        self._wall = wall
        self._lock = threading.Lock()  # of ranking, sizes and removed; never held while the disk is asked
        self._ranking = Ranking(REMEMBERED, seconds)
        self._sizes: dict[bytes, int] = {}
        self._removed: list[bytes] = []
        self._evicting = threading.Lock()
        self._collector: int | None = None  # descriptor of the lock file, while the lock is ours
        self._writer = f"{os.getpid()}-{id(self):x}"
        self.counts = Tally()

    def open(self) -> None:
        """Make the directory, and see that it can be written to. Raises StoreError."""
        try:
            self._path(self._namespace).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = self._directory / f"{self._writer}{TEMPORARY}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise _store_error(error) from error

    def close(self) -> None:
        """Let another be the collector."""
        if self._collector is not None:
            os.close(self._collector)
            self._collector = None

    # -- what is there

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def folder(self) -> Path:
        """Where the chunks of this model are."""
        return self._directory / self._namespace.hex()

    @property
    def used(self) -> int:
        """Bytes of all files of the directory, those being written included."""
        return self._count(0)

    def holds(self, key: bytes) -> bool:
        """As far as this process knows. Asks no disk."""
        return self._namespace + key in self._sizes

    def exists(self, key: bytes) -> bool:
        """Asks the disk; what another engine wrote is known from then on."""
        return self.holds(key) or self._discover(self._path(self._namespace + key))

    def take_removed(self) -> list[bytes]:
        """Keys of this model's chunks that went since the last call."""
        with self._lock:
            gone, self._removed = self._removed, []
        at = len(self._namespace)
        return [id_[at:] for id_ in gone if id_.startswith(self._namespace)]

    def scan(self) -> None:
        """Know all that is there, and forget what is not."""
        with self._lock:
            known = set(self._sizes)  # before the disk is read: what is written meanwhile is not missing
        there = set()
        for path in self._files(SUFFIX):
            with contextlib.suppress(ValueError):
                there.add(bytes.fromhex(path.parent.parent.name + path.stem))
        for id_ in there - known:
            self._discover(self._path(id_))
        for id_ in known - there:
            self._forget(id_)

    # -- reading and writing

    def read(self, key: bytes, buffer: bytearray) -> memoryview:
        """The payload, checked, inside the buffer. Raises StoreError; a file that is no good is removed."""
        id_ = self._namespace + key
        path = self._path(id_)
        try:
            payload = chunk_file.verify(_read_whole(path, buffer), self._namespace, key)
        except FileNotFoundError as error:
            self._forget(id_)
            raise StoreError(Failure.ABSENT, path.name) from error
        except ChunkError as error:
            self._remove(id_)
            raise StoreError(Failure.CORRUPT, f"{path.name}: {error}") from error
        except OSError as error:
            raise StoreError(Failure.UNREADABLE, f"{path.name}: {error.strerror}") from error
        self.use(key)
        with contextlib.suppress(OSError):
            os.utime(path)  # when it was last used outlives this process
        return payload

    def use(self, key: bytes) -> None:
        """Asked for again."""
        with self._lock:
            self._ranking.use(self._namespace + key, self._wall())

    def write(self, key: bytes, place: Place, payload: bytes | bytearray | memoryview) -> bool:
        """False: it was there. Raises StoreError; then nothing is left behind, and nothing counted."""
        if self.exists(key) if self._limits.shared else self.holds(key):
            return False
        head = chunk_file.encode(Head(self._namespace, key, place.parent, place.tokens, len(payload)), payload)
        size = len(head) + len(payload)
        self._make_room(size)
        path = self._path(self._namespace + key)
        fresh = path.with_name(f"{path.stem}.{self._writer}-{threading.get_ident():x}{TEMPORARY}")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with fresh.open("wb", buffering=0) as file:
                _write_all(file.fileno(), head, payload)
            fresh.rename(path)
        except OSError as error:
            _unlink(fresh)
            self._count(-size)
            raise _store_error(error) from error
        self._know(self._namespace + key, place, size, self._wall())
        return True

    # -- room

    def collect(self) -> None:
        """From time to time: know what others did, and, as the collector, clean up, count, keep the capacity.

        Raises StoreError if the directory cannot be used; a directory that was deleted is made again, empty.
        """
        if not self._directory.is_dir():
            self.close()
            self.open()
        self.scan()
        if self._become_collector():
            self._clean()
            self._recount()
            self._evict(self.used - self._limits.capacity)

    def _make_room(self, size: int) -> None:
        """Count `size` in. Raises StoreError if there is no room, and none can be made."""
        try:
            status = os.statvfs(self._directory)
        except OSError as error:
            raise _store_error(error) from error
        if (missing := self._limits.free + size - status.f_bavail * status.f_frsize) > 0:
            self._evict(missing)
            raise StoreError(Failure.DISK_FULL, f"less than {self._limits.free} bytes are free")
        if self._reserve(size):
            return
        self._evict(self.used + size - int(LOW_WATER * self._limits.capacity))
        if not self._reserve(size):
            raise StoreError(Failure.FULL, f"{self._limits.capacity} bytes are in use")

    def _evict(self, wanted: int) -> None:
        """As the collector, remove what is worth least, at least so many bytes."""
        if wanted <= 0 or not self._become_collector():
            return
        with self._evicting:
            while wanted > 0:
                with self._lock:
                    ids = self._ranking.pop(1, self._wall())
                if not ids:
                    return
                wanted -= self._sizes.get(ids[0], 0)
                self._remove(ids[0])
                self.counts.add("evicted")

    def _reserve(self, size: int) -> bool:
        return self._count(size, most=self._limits.capacity) >= 0

    def _count(self, change: int, most: int | None = None) -> int:
        """Change `used` under its lock; the new count, or -1 and no change if it would be more than `most`."""
        try:
            descriptor = os.open(self._directory / "used", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                raw = os.pread(descriptor, _COUNT.size, 0)
                count = max(0, (_COUNT.unpack(raw)[0] if len(raw) == _COUNT.size else 0) + change)
                if most is not None and count > most:
                    return -1
                if change:
                    os.pwrite(descriptor, _COUNT.pack(count), 0)
                return count
            finally:
                os.close(descriptor)
        except OSError as error:
            if change > 0:
                raise _store_error(error) from error
            return 0  # the collector counts again

    def _recount(self) -> None:
        """What the files really take; of what is being written meanwhile, up to one file a writer is missed."""
        used = self.used
        sizes = 0
        for path in self._files(SUFFIX, TEMPORARY):
            with contextlib.suppress(OSError):
                sizes += path.stat().st_size
        self._count(sizes - used)

    def _clean(self) -> None:
        """Files that a dead writer left. Where nobody else writes, all but our own are."""
        for path in self._files(TEMPORARY):
            with contextlib.suppress(OSError):
                old = self._wall() - path.stat().st_mtime > ABANDONED_S
                if old or not (self._limits.shared or self._writer in path.name):
                    path.unlink()
                    self.counts.add("left_over")

    def _become_collector(self) -> bool:
        if self._collector is not None:
            return True
        try:
            descriptor = os.open(self._directory / "collector", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        self._collector = descriptor
        return True

    # -- inside

    def _path(self, id_: bytes) -> Path:
        key = id_[NAMESPACE_BYTES:].hex()
        return self._directory / id_[:NAMESPACE_BYTES].hex() / key[:2] / f"{key}{SUFFIX}"

    def _files(self, *suffixes: str) -> Iterator[Path]:
        for folder, _, names in os.walk(self._directory):
            for name in names:
                if name.endswith(suffixes):
                    yield Path(folder, name)

    def _discover(self, path: Path) -> bool:
        """A file that this process did not know."""
        try:
            with path.open("rb", buffering=0) as file:
                head = chunk_file.decode(file.read(HEAD_BYTES))
                status = os.fstat(file.fileno())
        except (OSError, ChunkError):
            return False
        self._know(head.namespace + head.key, Place(head.parent, head.tokens), status.st_size, status.st_mtime)
        return True

    def _know(self, id_: bytes, place: Place, size: int, at: float) -> None:
        with self._lock:
            if id_ not in self._sizes:
                self._sizes[id_] = size
                parent = id_[:NAMESPACE_BYTES] + place.parent if place.parent else b""
                self._ranking.add(id_, parent, place.tokens, at)

    def _forget(self, id_: bytes) -> None:
        with self._lock:
            if self._sizes.pop(id_, None) is not None:
                self._removed.append(id_)
            if id_ in self._ranking:
                self._ranking.remove(id_)

    def _remove(self, id_: bytes) -> None:
        """Evicted, or no good."""
        size = self._sizes.get(id_, 0)
        self._forget(id_)
        if _unlink(self._path(id_)):
            self._count(-size)


def _read_whole(path: Path, buffer: bytearray) -> memoryview:
    """Raises OSError, or ChunkError for a file that is longer than any chunk."""
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size > len(view):
            raise ChunkError(f"more than {len(view)} bytes")
        read = 0
        while more := file.readinto(view[read:]):
            read += more
    return view[:read]


def _write_all(descriptor: int, head: bytes, payload: bytes | bytearray | memoryview) -> None:
    written = os.writev(descriptor, [head, payload])
    whole = memoryview(head + bytes(payload)) if written < len(head) + len(payload) else memoryview(b"")
    while written < len(whole):
        written += os.write(descriptor, whole[written:])


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True


def _store_error(error: OSError) -> StoreError:
    kinds = {
        errno.ENOSPC: Failure.DISK_FULL,
        errno.EDQUOT: Failure.DISK_FULL,
        errno.EROFS: Failure.READ_ONLY,
        errno.EACCES: Failure.DENIED,
        errno.EPERM: Failure.DENIED,
    }
    return StoreError(kinds.get(error.errno or 0, Failure.BROKEN), f"{error.filename}: {error.strerror}")
