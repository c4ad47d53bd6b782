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
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from prefixpool_agent.tiers import chunk_file
from prefixpool_agent.tiers.chunk_file import HEAD_BYTES, NAMESPACE_BYTES, ChunkError, Head
from prefixpool_agent.tiers.chunk_io import files_below, read_whole, unlink, write_all
from prefixpool_agent.tiers.disk_account import Account
from prefixpool_agent.tiers.disk_ledger import Failure, Ledger, Removal, StoreError, store_error
from prefixpool_agent.tiers.tally import Tally
from prefixpool_agent.tiers.trail import Place
from prefixpool_agent.tiers.worth import Ranking

SUFFIX: Final = ".kv"
TEMPORARY: Final = ".tmp"
ABANDONED_S: Final = 300.0  # nobody writes a chunk for so long: its writer is dead
LOW_WATER: Final = 0.95  # of the capacity: the collector evicts down to there, not file by file
REMEMBERED: Final = 65_536  # evicted chunks


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
        self._ledger = Ledger(directory, limits.capacity)
        self._account = Account(self._ledger)
        self._writer = f"{os.getpid()}-{id(self):x}"
        self.counts = Tally()

    def open(self) -> None:
        """Make the directory, and see that it can be written to. Raises StoreError."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)  # what prompts said can be read from their chunks
            probe = self.folder / f"{self._writer}{TEMPORARY}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise store_error(error) from error

    def close(self) -> None:
        """Let another be the collector."""
        self._ledger.close()

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
        return self._account.used

    @property
    def last_used(self) -> int:
        """The same as this process last counted it. Asks no disk."""
        return self._ledger.last

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
                there.add(_id(path))
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
            payload = chunk_file.verify(read_whole(path, buffer), self._namespace, key)
        except FileNotFoundError as error:
            self._forget(id_)
            raise StoreError(Failure.ABSENT, path.name) from error
        except ChunkError as error:
            self._remove(id_)
            self._count(id_, Removal.DAMAGED)
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
        id_ = self._namespace + key
        self._make_room(id_, size)
        path = self._path(id_)
        fresh = path.with_name(f"{path.stem}.{self._writer}-{threading.get_ident():x}{TEMPORARY}")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with fresh.open("wb", buffering=0) as file:
                write_all(file.fileno(), head, payload)
            fresh.rename(path)
        except OSError as error:
            unlink(fresh)
            self._account.give_back(id_, size)
            raise store_error(error) from error
        self._account.written(id_)
        self._know(id_, place, size, self._wall())
        return True

    # -- room

    def collect(self) -> None:
        """From time to time: know what others did, and, as the collector, clean up, count, keep the capacity.

        Raises StoreError if the directory cannot be used; a directory that was deleted is made again, empty.
        """
        try:
            self._look()
        except OSError as error:
            raise store_error(error) from error

    def _look(self) -> None:
        if not self._ledger.in_place():
            self.close()
            self.open()
        self.scan()
        if self._ledger.collects():
            self._clean()
            self._account.recount(self._sizes_there)
            # Others cannot make room: where there are any, it must not wait until this process writes.
            wanted = LOW_WATER * self._limits.capacity if self._limits.shared else self._limits.capacity
            self._evict(self.used - int(wanted), Removal.CAPACITY)

    def _make_room(self, id_: bytes, size: int) -> None:
        """Count the chunk in. Raises StoreError if there is no room, and none can be made."""
        try:
            status = os.statvfs(self._directory)
        except OSError as error:
            raise store_error(error) from error
        if (missing := self._limits.free + size - status.f_bavail * status.f_frsize) > 0:
            self._evict(missing, Removal.FREE_SPACE)
            raise StoreError(Failure.DISK_FULL, f"less than {self._limits.free} bytes are free")
        if self._account.reserve(id_, size):
            return
        self._evict(self.used + size - int(LOW_WATER * self._limits.capacity), Removal.CAPACITY)
        if not self._account.reserve(id_, size):
            raise StoreError(Failure.FULL, f"{self._limits.capacity} bytes are in use")

    def _evict(self, wanted: int, why: Removal) -> None:
        """As the collector, remove what is worth least, at least so many bytes."""
        if wanted <= 0 or not self._ledger.collects():
            return
        with self._evicting:
            while wanted > 0:
                with self._lock:
                    ids = self._ranking.pop(1, self._wall())
                if not ids:
                    return
                wanted -= self._sizes.get(ids[0], 0)
                self._remove(ids[0])
                self._count(ids[0], why)

    def _sizes_there(self) -> Iterator[tuple[bytes, int]]:
        """Bytes of every chunk; of those that others are writing, too."""
        for path in self._files(SUFFIX, TEMPORARY):
            with contextlib.suppress(OSError):
                yield self._counted_as(path), path.stat().st_size

    def _counted_as(self, path: Path) -> bytes:
        """The chunk that it is or that this process makes of it; any other file by itself."""
        if path.suffix == SUFFIX or self._writer in path.name:
            with contextlib.suppress(ValueError):
                return _id(path)
        return os.fsencode(path)

    def _clean(self) -> None:
        """Files that a dead writer left. Where nobody else writes, all but our own are."""
        for path in self._files(TEMPORARY):
            with contextlib.suppress(OSError):
                old = self._wall() - path.stat().st_mtime > ABANDONED_S
                if old or not (self._limits.shared or self._writer in path.name):
                    path.unlink()
                    self.counts.add("left_over")

    # -- inside

    def _path(self, id_: bytes) -> Path:
        key = id_[NAMESPACE_BYTES:].hex()
        return self._directory / id_[:NAMESPACE_BYTES].hex() / key[:2] / f"{key}{SUFFIX}"

    def _files(self, *suffixes: str) -> Iterator[Path]:
        """Of all models: what else lies in the directory is others', whatever it is called. Raises OSError."""
        for model in self._directory.glob("[0-9a-f]" * 2 * NAMESPACE_BYTES):
            yield from files_below(model, suffixes)

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
        self._account.remove(id_, size, self._path(id_))

    def _count(self, id_: bytes, why: Removal) -> None:
        mine = id_.startswith(self._namespace)
        self.counts.add(f"evicted_{why if mine else Removal.FOREIGN}")


def _id(path: Path) -> bytes:
    """Namespace and key of a chunk's file. Raises ValueError for another name."""
    return bytes.fromhex(path.parent.parent.name + path.name.partition(".")[0])
