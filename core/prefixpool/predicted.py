"""What replicas will soon hold because something was just sent there: an overlay on the index, with an end.

A request counts as residency from the moment of its dispatch, because the next one with the same prefix must not be
computed elsewhere (research: residency.md 8). For replicas without events it is all that is known of their cache.
Time comes in as an argument; any clock will do as long as it is always the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from prefixpool.index import MAX_DEPTH, SHIFT

NOTHING: Final = 0  # ticket of an empty prediction


class _Entry(NamedTuple):
    column: int
    hashes: Sequence[int]


class Predicted:
    """Device-tier boundaries by column, each as often as it was predicted. Not thread-safe. `capacity` bounds their sum."""

    def __init__(self, capacity: int) -> None:
        self.evicted = 0
        self._marks: dict[int, int] = {}  # hash -> value as in the index
        self.marks: Mapping[int, int] = self._marks  # for `PrefixIndex.match`; read only
        self._capacity = capacity
        self._columns: dict[int, dict[int, int]] = {}  # column -> hash -> how many predictions say so
        self._entries: dict[int, _Entry] = {}
        self._ends: list[tuple[float, int]] = []  # heap of (until, ticket); tickets may be gone
        self._tickets = NOTHING
        self._size = 0

    def __len__(self) -> int:
        """Boundaries over all predictions, common ones counted each time."""
        return self._size

    def count(self, column: int) -> int:
        """Distinct boundaries predicted for a column."""
        return len(self._columns.get(column, ()))

    def add(self, column: int, hashes: Sequence[int], depths: Sequence[int], until: float) -> int:
        """Predict boundaries (those that the index has for this column already may be left out) and get a ticket.

        Beyond the capacity the predictions that end first go first. `hashes` is kept, so don't change it.
        """
        if not hashes:
            return NOTHING
        counts = self._columns.setdefault(column, {})
        marks, bit = self._marks, 1 << SHIFT + 3 * column
        for key, depth in zip(hashes, depths, strict=True):
            seen = counts.get(key, 0)
            counts[key] = seen + 1
            if not seen:
                marks[key] = marks.get(key, min(depth, MAX_DEPTH)) | bit
        self._tickets += 1
        self._entries[self._tickets] = _Entry(column, hashes)
        heappush(self._ends, (until, self._tickets))
        self._size += len(hashes)
        while self._size > self._capacity:
            self.evicted += self._first()
        return self._tickets

    def remove(self, ticket: int) -> bool:
        """Take a prediction back, exactly once: False if it has ended already."""
        entry = self._entries.pop(ticket, None)
        if entry is None:
            return False
        counts, marks, mine = self._columns[entry.column], self._marks, ~(0b111 << SHIFT + 3 * entry.column)
        for key in entry.hashes:
            left = counts[key] - 1
            if left:
                counts[key] = left
                continue
            del counts[key]
            rest = marks[key] & mine
            if rest >> SHIFT:
                marks[key] = rest
            else:
                del marks[key]
        self._size -= len(entry.hashes)
        if len(self._ends) > 64 + 4 * len(self._entries):
            self._ends = [end for end in self._ends if end[1] in self._entries]
            heapify(self._ends)
        return True

    def about(self, column: int, hashes: Iterable[int]) -> set[int]:
        """Those of `hashes` that are predicted for a column."""
        return self._columns.get(column, {}).keys() & hashes

    def concerns(self, ticket: int, hashes: set[int]) -> bool:
        """Whether a prediction that has not ended is about any of `hashes`."""
        entry = self._entries.get(ticket)
        return entry is not None and not hashes.isdisjoint(entry.hashes)

    def expire(self, now: float) -> int:
        """End what was predicted until `now` or earlier; how many that were."""
        ended = 0
        while self._ends and self._ends[0][0] <= now:
            ended += self._first()
        return ended

    def drop_column(self, column: int) -> None:
        """Forget a replica."""
        for ticket in [ticket for ticket, entry in self._entries.items() if entry.column == column]:
            self.remove(ticket)
        self._columns.pop(column, None)

    def _first(self) -> bool:
        return self.remove(heappop(self._ends)[1])
