"""What is worth keeping: expected saving per byte, learned from what is asked for again. Pure; O(log n) an operation.

    worth = expected hits per second in the pool x seconds that computing it again would take

Hits are expected as of chunks like this one: as often used, unused for as long (`reuse`). How often counts beyond an
eviction. With nothing learned yet the order is least recently used.

The engine walks a prefix from its root, so a chunk without its parent serves nobody: only chunks without resident children
may go. Reserved chunks do not go until their time is over. Within a class the oldest and the newest are weighed: where
more is asked for in turn than there is room for, it is the newest that should go, not the one whose turn is next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from heapq import heapify, heappop, heappush
from typing import Final

from prefixpool_agent.tiers.deadlines import Deadlines
from prefixpool_agent.tiers.reuse import USES, Reuse

DEARER: Final = 1.2  # weight of twice the cost: with 2, wrong estimates of what is dear cost more than right ones save
SAMPLE: Final = 8192  # chunks that are followed, out of
FOLLOWED: Final = 2  # times what is remembered
_LEVELS: Final = 6  # classes of cost: powers of two of the cheapest
_EVEN_TOKENS: Final = 16_384  # where attention to what is before takes as long as all else; of that order for most models


def recompute(tokens: int) -> float:
    """Time to compute a chunk that ends at so many tokens, as a multiple of the first one's."""
    return 1.0 + tokens / _EVEN_TOKENS


class Chunk:
    """One resident chunk."""

    __slots__ = ("at", "busy", "cost", "key", "parent", "uses", "version")

    def __init__(self, key: bytes, parent: bytes, cost: int, at: float, uses: int) -> None:
        self.key = key
        self.parent = parent
        self.cost = cost  # class of cost
        self.at = at  # last use
        self.uses = uses
        self.busy = False  # being read or written: must not go
        self.version = 0  # of its entry in the heaps


class Ranking:
    """Order of going. Times are seconds, of any clock that does not go back."""

    def __init__(self, remembered: int, seconds: Callable[[int], float]) -> None:
        """`remembered`: how many evicted chunks to remember. `seconds`: to compute a chunk that ends at so many tokens."""
        self._remembered = remembered
        self._seconds = seconds
        self._cheapest = seconds(0)
        self.clear()

    def clear(self) -> None:
        """Nothing is resident, nothing was learned."""
        self._reuse = Reuse(SAMPLE, max(1, FOLLOWED * self._remembered))
        self._chunks: dict[bytes, Chunk] = {}
        self._children: dict[bytes, int] = {}  # key -> resident chunks behind it, whether it is resident or not
        self._ghosts: OrderedDict[bytes, int] = OrderedDict()  # evicted -> uses
        self._heaps = [
            (_Heap(sign, self._chunks), DEARER**level) for sign in (1, -1) for _ in range(USES) for level in range(_LEVELS)
        ]
        self._reserved = Deadlines()

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._chunks

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._chunks)

    @property
    def entries(self) -> int:
        """In all heaps: bounded by a multiple of what is resident."""
        return sum(len(heap) for heap, _ in self._heaps) + self._reserved.entries

    def add(self, key: bytes, parent: bytes, tokens: int, at: float, *, busy: bool = False) -> None:
        """A chunk came; one that went a while ago counts as used again."""
        uses = min(self._ghosts.pop(key, -1) + 1, USES - 1)
        self._reuse.seen(key, uses, at)
        chunk = self._chunks[key] = Chunk(key, parent, self._level(tokens), at, uses)
        chunk.busy = busy
        self._link(chunk)

    def use(self, key: bytes, at: float) -> None:
        """Used again. Unknown keys are ignored."""
        if (chunk := self._chunks.get(key)) is None:
            return
        chunk.uses = min(chunk.uses + 1, USES - 1)
        chunk.at = max(at, chunk.at)
        self._reuse.seen(key, chunk.uses, chunk.at)
        self._push(chunk)

    def set_busy(self, key: bytes, busy: bool) -> None:
        """Being read or written, or no longer."""
        chunk = self._chunks[key]
        chunk.busy = busy
        self._push(chunk)

    def reserve(self, key: bytes, until: float) -> None:
        """It must not go before then."""
        if self._reserved.prolong(key, until):
            self._push(self._chunks[key])

    def remove(self, key: bytes) -> None:
        """It is gone; the caller knows why. Not remembered."""
        self._reserved.drop(key)
        self._unlink(self._chunks.pop(key))

    def pop(self, count: int, at: float, protected: Collection[bytes] = ()) -> list[bytes] | None:
        """The least worth so many, taken out and remembered; None, and nothing changed, if there are not so many."""
        self._release(at)
        taken: list[Chunk] = []
        while len(taken) < count:
            if (chunk := self._least(at, protected)) is None:
                self._put_back(taken)
                return None
            del self._chunks[chunk.key]
            self._unlink(chunk)
            taken.append(chunk)
        for chunk in taken:
            self._remember(chunk)
        return [chunk.key for chunk in taken]

    # -- inside

    def _level(self, tokens: int) -> int:
        return min(int(self._seconds(tokens) / self._cheapest).bit_length() - 1, _LEVELS - 1)

    def _push(self, chunk: Chunk) -> None:
        """Put it where it now belongs; what stands elsewhere for it is no longer valid."""
        chunk.version += 1
        if chunk.busy or chunk.key in self._reserved or chunk.key in self._children:
            return
        half = USES * _LEVELS
        place = chunk.uses * _LEVELS + chunk.cost
        self._heaps[place][0].push(chunk)
        self._heaps[half + place][0].push(chunk)

    def _least(self, at: float, protected: Collection[bytes]) -> Chunk | None:
        """Of the candidates of all classes the one worth least; ties: the oldest use."""
        best: Chunk | None = None
        least = (float("inf"), 0.0)
        for heap, factor in self._heaps:
            if (chunk := heap.first(protected)) is not None:
                rank = (self._reuse.of(chunk.uses, at - chunk.at) * factor, chunk.at)
                if rank < least:
                    best, least = chunk, rank
        return best

    def _link(self, chunk: Chunk) -> None:
        self._children[chunk.parent] = self._children.get(chunk.parent, 0) + 1
        if (above := self._chunks.get(chunk.parent)) is not None:
            above.version += 1  # it has a child now, and must not go
        self._push(chunk)

    def _unlink(self, chunk: Chunk) -> None:
        left = self._children[chunk.parent] - 1
        if left:
            self._children[chunk.parent] = left
            return
        del self._children[chunk.parent]
        if (above := self._chunks.get(chunk.parent)) is not None:
            self._push(above)

    def _put_back(self, taken: list[Chunk]) -> None:
        for chunk in reversed(taken):
            self._chunks[chunk.key] = chunk
            self._link(chunk)

    def _release(self, at: float) -> None:
        """Reservations whose time is over."""
        for key in self._reserved.over(at):
            self._push(self._chunks[key])

    def _remember(self, chunk: Chunk) -> None:
        self._ghosts[chunk.key] = chunk.uses
        if len(self._ghosts) > self._remembered:
            self._ghosts.popitem(last=False)


class _Heap:
    """Chunks by last use, the oldest first (sign 1) or the newest (sign -1). Entries out of date are skipped, and swept out
    when there are twice as many entries as after the last sweep.
    """

    __slots__ = ("_chunks", "_items", "_sign", "_sweep_at")

    def __init__(self, sign: int, chunks: Mapping[bytes, Chunk]) -> None:
        self._sign = sign
        self._chunks = chunks
        self._items: list[tuple[float, bytes, int]] = []
        self._sweep_at = 64

    def __len__(self) -> int:
        return len(self._items)

    def push(self, chunk: Chunk) -> None:
        heappush(self._items, (self._sign * chunk.at, chunk.key, chunk.version))
        if len(self._items) >= self._sweep_at:
            self._items = [item for item in self._items if self._valid(item)]
            heapify(self._items)
            self._sweep_at = max(64, 2 * len(self._items))

    def first(self, protected: Collection[bytes]) -> Chunk | None:
        aside, found = [], None
        while self._items and found is None:
            item = self._items[0]
            if not self._valid(item):
                heappop(self._items)
            elif item[1] in protected:
                aside.append(heappop(self._items))
            else:
                found = self._chunks[item[1]]
        for item in aside:
            heappush(self._items, item)
        return found

    def _valid(self, item: tuple[float, bytes, int]) -> bool:
        chunk = self._chunks.get(item[1])
        return chunk is not None and chunk.version == item[2]
