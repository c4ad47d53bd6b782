"""One process's share in the count of a directory's bytes, and counting the files again while chunks come and go.

A directory takes seconds to walk. A chunk that is evicted meanwhile is off the count already, and the walk may have seen it
or not; so what this process does to a chunk meanwhile is written down, and goes before what the walk saw of it. What other
processes do meanwhile is not known: a chunk that one of their threads was writing when the walk began may be missed (so the
capacity is exceeded by one file a writer at most), and one that they began during the walk may count twice, until the next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from prefixpool_agent.tiers.chunk_io import unlink
from prefixpool_agent.tiers.disk_ledger import Ledger


class Own(NamedTuple):
    """A chunk that this process changed during a walk."""

    size: int  # bytes
    counts: bool  # at the walk's end: it is there, or being written


def drift(seen: Mapping[bytes, int], own: Mapping[bytes, Own], counted: int) -> int:
    """Bytes that a count lacks.

    `seen`: bytes by chunk, as a walk found them; `own`: what this process changed during the walk or was writing when it
    began; `counted`: the count at its begin, and this process's changes since.
    """
    others = sum(size for id_, size in seen.items() if id_ not in own)
    return others + sum(size for size, counts in own.values() if counts) - counted


class Account:
    """Changes of the count, each together with what it stands for. Called from any thread; raises StoreError as `Ledger`."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()  # what is noted and what is counted are one
        self._writing: dict[bytes, int] = {}
        self._walk: dict[bytes, Own] | None = None
        self._changed = 0  # bytes, during the walk

    @property
    def used(self) -> int:
        """Bytes of all files of the directory, those being written included."""
        return self._ledger.count(0)

    def reserve(self, id_: bytes, size: int) -> bool:
        """Count a chunk in that will be written. False: no room."""
        with self._lock:
            if not self._ledger.reserve(size):
                return False
            self._writing[id_] = size
            self._note(id_, size, size)
            return True

    def written(self, id_: bytes) -> None:
        """It is there."""
        with self._lock:
            self._writing.pop(id_, None)

    def give_back(self, id_: bytes, size: int) -> None:
        """It was not written after all."""
        with self._lock:
            self._writing.pop(id_, None)
            self._note(id_, size, -size)
            self._ledger.count(-size)

    def remove(self, id_: bytes, size: int, path: Path) -> None:
        """Take its file away, and off the count unless somebody else had taken it."""
        with self._lock:
            if unlink(path):
                self._note(id_, size, -size)
                self._ledger.count(-size)

    def recount(self, walk: Callable[[], Iterable[tuple[bytes, int]]]) -> None:
        """Put the count right by all files that there are, given as chunk and bytes."""
        with self._lock:
            begin = self._ledger.read()
            self._walk, self._changed = {id_: Own(size, True) for id_, size in self._writing.items()}, 0
        try:
            seen = dict(walk())
            with self._lock:
                self._ledger.count(drift(seen, self._walk, begin + self._changed))
        finally:
            self._walk = None

    def _note(self, id_: bytes, size: int, change: int) -> None:
        if self._walk is not None:
            self._walk[id_] = Own(size, change > 0)
            self._changed += change
