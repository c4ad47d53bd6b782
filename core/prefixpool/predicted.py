"""What replicas will soon hold because something was just sent there: an overlay on the index, with an end.

A request counts as residency from the moment of its dispatch, because the next one with the same prefix must not be
computed elsewhere (research: residency.md 8). For replicas without events it is all that is known of their cache.
Time comes in as an argument; any clock will do as long as it is always the same.

Chains that begin alike form a tree, one per column. A prediction holds on to its deepest boundary only, and each boundary to
the one before it, so that a prediction costs as much as there is new in it, however long the prompt.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from prefixpool.levels import MAX_DEPTH, SHIFT

NOTHING: Final = 0  # ticket of an empty prediction
_NONE: Final = -1  # before the first boundary


class _Tree(NamedTuple):
    """Boundaries of one column, by hash. One that nothing holds on to any more is gone."""

    before: dict[int, int]  # the boundary before it
    more: dict[int, int]  # how many hold on to it besides the first one, if any do


class Predicted:
    """Device-tier boundaries by column. Not thread-safe. `capacity` bounds the sum of boundaries and predictions."""

    def __init__(self, capacity: int) -> None:
        self.evicted = 0
        self._marks: dict[int, int] = {}  # hash -> value as in the index
        self.marks: Mapping[int, int] = self._marks  # for `PrefixIndex.walk`; read only
        self._capacity = capacity
        self._columns: dict[int, _Tree] = {}
        self._entries: dict[int, tuple[int, int]] = {}  # ticket -> column, deepest boundary; plain: many, and free of cycles
        self._ends: list[tuple[float, int]] = []  # heap of (until, ticket); tickets may be gone
        self._tickets = NOTHING
        self._size = 0

    def __len__(self) -> int:
        """Boundaries over all columns."""
        return self._size

    def count(self, column: int) -> int:
        """Boundaries predicted for a column."""
        tree = self._columns.get(column)
        return len(tree.before) if tree is not None else 0

    def add(self, column: int, hashes: Sequence[int], depths: Callable[[int], Iterable[int]], until: float) -> int:
        """Predict boundaries, from shallow to deep, and get a ticket. Those that the index has for this column already may
        be left out at the front. `depths`: token depths of those from an index on, asked for what is new.

        Beyond the capacity the predictions that end first go first.
        """
        if not hashes:
            return NOTHING
        before, more = self._columns.setdefault(column, _Tree({}, {}))
        marks, bit, size = self._marks, 1 << SHIFT + 3 * column, len(before)
        known = bisect_left(hashes, True, key=lambda key: key not in before)
        last = hashes[known - 1] if known else _NONE
        if known:
            more[last] = more.get(last, 0) + 1
        for key, depth in zip(hashes[known:], depths(known) if known < len(hashes) else (), strict=True):
            if key in before:  # another chain that begins here, since its front was a fact then: the two stay apart
                break
            before[key] = last
            marks[key] = marks.get(key, depth if depth < MAX_DEPTH else MAX_DEPTH) | bit
            last = key
        self._tickets += 1
        self._entries[self._tickets] = column, last
        heappush(self._ends, (until, self._tickets))
        self._size += len(before) - size
        while self._size + len(self._entries) > self._capacity:
            self.evicted += self._first()
        return self._tickets

    def remove(self, ticket: int) -> bool:
        """Take a prediction back, exactly once: False if it has ended already."""
        entry = self._entries.pop(ticket, None)
        if entry is None:
            return False
        column, key = entry
        before, more = self._columns[column]
        marks, mine = self._marks, ~(0b111 << SHIFT + 3 * column)
        while key != _NONE and key not in more:
            rest = marks[key] & mine
            if rest >> SHIFT:
                marks[key] = rest
            else:
                del marks[key]
            self._size -= 1
            key = before.pop(key)
        if key != _NONE:
            more[key] -= 1
            if not more[key]:
                del more[key]
        if len(self._ends) > 64 + 4 * len(self._entries):
            self._ends = [end for end in self._ends if end[1] in self._entries]
            heapify(self._ends)
        return True

    def about(self, column: int, hashes: Iterable[int]) -> set[int]:
        """Those of `hashes` that are predicted for a column."""
        tree = self._columns.get(column)
        return tree.before.keys() & hashes if tree is not None else set()

    def concerns(self, ticket: int, hashes: set[int]) -> bool:
        """Whether a prediction that has not ended is about any of `hashes`."""
        entry = self._entries.get(ticket)
        if entry is None:
            return False
        column, key = entry
        before = self._columns[column].before
        while key != _NONE and key not in hashes:
            key = before[key]
        return key != _NONE

    def expire(self, now: float) -> int:
        """End what was predicted until `now` or earlier; how many that were."""
        ended = 0
        while self._ends and self._ends[0][0] <= now:
            ended += self._first()
        return ended

    def drop_column(self, column: int) -> None:
        """Forget a replica."""
        for ticket in [ticket for ticket, entry in self._entries.items() if entry[0] == column]:
            self.remove(ticket)
        self._columns.pop(column, None)

    def _first(self) -> bool:
        return self.remove(heappop(self._ends)[1])
