"""When chunks are asked for again, learned by following a sample of them. Pure; O(1) an operation.

A sample is followed whether or not it is resident, for several times as long as the pool keeps a chunk: so what was evicted
too early is seen, and what nobody comes back for, too. Kinds of chunks: by how often they were used.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final
from zlib import crc32

from prefixpool_agent.tiers.density import AGES, EDGES_S, age_of, densities

USES: Final = 4  # kinds: never used again, once, twice, more often
FADING: Final = 0.95  # of what was counted, at each new learning
_FIRST: Final = 64  # events before the first learning; twice as many before each next one, up to a part of the sample
_PART: Final = 8
_SETTLED: Final = 4  # waits that are brought up to date at each event
_HASHES: Final = 1 << 32


class Wait:
    """One chunk of the sample, since its last use."""

    __slots__ = ("at", "counted_s", "uses")

    def __init__(self, uses: int, at: float) -> None:
        self.uses = uses
        self.at = at
        self.counted_s = 0.0  # of its waiting


class Reuse:
    """Times are seconds, of any clock that does not go back."""

    def __init__(self, sample: int, among: int) -> None:
        """Follow so many chunks, evenly out of the last `among` different ones that were asked for."""
        self._sample = min(sample, among)
        self._sampled_below = _HASHES * self._sample // among
        self._waits: OrderedDict[bytes, Wait] = OrderedDict()  # the longest unused first
        self._to_settle: deque[tuple[bytes, Wait]] = deque()
        self._hits = [[0.0] * AGES for _ in range(USES)]
        self._waited_s = [[0.0] * AGES for _ in range(USES)]
        self._pause = self._events_left = _FIRST
        self._table = densities(self._hits, self._waited_s)

    def seen(self, key: bytes, uses: int, at: float) -> None:
        """Asked for; used so often now."""
        if crc32(key) >= self._sampled_below:
            return
        if (before := self._waits.pop(key, None)) is not None:
            self._settle(before, at)
            self._hits[before.uses][age_of(at - before.at)] += 1
        wait = self._waits[key] = Wait(uses, at)
        self._to_settle.append((key, wait))
        if len(self._waits) > self._sample:
            self._settle(self._waits.popitem(last=False)[1], at)
        self._settle_some(at)
        self._events_left -= 1
        if not self._events_left:
            self._learn()

    def of(self, uses: int, age_s: float) -> float:
        """Expected hits per second in the pool of a chunk that was used so often, and not for so long."""
        return self._table[uses][age_of(age_s)]

    def _settle_some(self, at: float) -> None:
        """Waiting that goes on counts, too: else only what is hit would be seen."""
        for _ in range(min(_SETTLED, len(self._to_settle))):
            key, wait = self._to_settle.popleft()
            if self._waits.get(key) is wait:
                self._settle(wait, at)
                self._to_settle.append((key, wait))

    def _settle(self, wait: Wait, at: float) -> None:
        begin_s, end_s = wait.counted_s, at - wait.at
        if end_s <= begin_s:
            return
        waited_s = self._waited_s[wait.uses]
        for age in range(age_of(begin_s), age_of(end_s) + 1):
            waited_s[age] += max(0.0, min(end_s, EDGES_S[age + 1]) - max(begin_s, EDGES_S[age]))
        wait.counted_s = end_s

    def _learn(self) -> None:
        self._table = densities(self._hits, self._waited_s)
        most = max(_FIRST, self._sample // _PART)
        if self._pause < most:
            self._pause = self._events_left = min(2 * self._pause, most)
            return
        self._events_left = self._pause
        for rows in (self._hits, self._waited_s):
            for row in rows:
                row[:] = [count * FADING for count in row]
