"""When what was promised ends. Pure; O(log n) an operation, and never more than a multiple of what is promised."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Final

_LEAST: Final = 64  # entries that are not worth sweeping


class Deadlines:
    """Of keys, in seconds of any one clock. A promise that is renewed all the time leaves nothing behind."""

    def __init__(self) -> None:
        self._ends_s: dict[bytes, float] = {}
        self._soonest: list[tuple[float, bytes]] = []  # entries out of date are skipped

    def __contains__(self, key: bytes) -> bool:
        return key in self._ends_s

    @property
    def entries(self) -> int:
        """All that is kept, the entries out of date included."""
        return len(self._soonest)

    def prolong(self, key: bytes, end_s: float) -> bool:
        """Never shortens. False: it lasts as long already."""
        if end_s <= self._ends_s.get(key, float("-inf")):
            return False
        self._ends_s[key] = end_s
        heappush(self._soonest, (end_s, key))
        if len(self._soonest) > max(_LEAST, 2 * len(self._ends_s)):
            self._soonest = [(end_s, key) for key, end_s in self._ends_s.items()]
            heapify(self._soonest)
        return True

    def drop(self, key: bytes) -> bool:
        """False: nothing was promised."""
        return self._ends_s.pop(key, None) is not None

    def clear(self) -> None:
        """Nothing is promised."""
        self._ends_s.clear()
        self._soonest.clear()

    def over(self, now_s: float) -> Iterator[bytes]:
        """Takes out what has ended."""
        while self._soonest and self._soonest[0][0] <= now_s:
            end_s, key = heappop(self._soonest)
            if self._ends_s.get(key) == end_s:
                del self._ends_s[key]
                yield key
