"""The host tier: a write-through copy of full blocks with its own LRU, as vLLM's offloading connector keeps it. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from prefixpool_agent.sim.pool import MEDIUM_HOST, Event, removed
from prefixpool_agent.tiers.disk_ledger import Removal
from prefixpool_agent.tiers.tally import Tally


class Copy(NamedTuple):
    """Contents of one full block: what `Block.content` and `Block.state` were."""

    content: tuple[int, ...]
    state: bytes


class HostTier:
    """Capacity in blocks; 0 = no tier."""

    def __init__(self, blocks: int) -> None:
        self.capacity = blocks
        self._copies: OrderedDict[bytes, Copy] = OrderedDict()
        self._events: list[Event] = []
        self.counts = Tally()  # names of the host tier's metric

    def __len__(self) -> int:
        return len(self._copies)

    def store(self, digest: bytes, copy: Copy, stored: Event) -> None:
        """Keep a copy; `stored` is the device's event of the block, which is announced again with this medium."""
        if not self.capacity:
            return
        if digest in self._copies:
            self._copies.move_to_end(digest)
            return
        while len(self._copies) >= self.capacity:
            old, _ = self._copies.popitem(last=False)
            self._events.append(removed(old, MEDIUM_HOST))
            self.counts.add(f"evicted_{Removal.CAPACITY}")
        self._copies[digest] = copy
        self.counts.add("written")
        self._events.append({**stored, "medium": MEDIUM_HOST})

    def get(self, digest: bytes) -> Copy | None:
        """A copy, which counts as used."""
        copy = self._copies.get(digest)
        if copy is not None:
            self._copies.move_to_end(digest)
            self.counts.add("read")
        return copy

    def reset(self) -> None:
        """Forget everything. vLLM emits no removals for it: `AllBlocksCleared` is all that subscribers see."""
        self._copies.clear()

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events
