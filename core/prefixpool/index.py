"""Which replica holds which boundary, in which tier: one index for all replicas (research: prefix_index.md).

256 dicts by the low bits of the hash (the resize of one dict of a million entries would stall the router for 60 ms), values
packed into one int (not tracked by the garbage collector, unlike tuples):

    bits 0..22  token depth | bit 23  seen again, for eviction | from bit 24 on: 3 bits a column: device, host, disk

One lookup serves all replicas, so a match costs hardly more for 256 of them than for 8.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest
from itertools import islice, repeat
from typing import Final

from prefixpool.levels import MAX_DEPTH, SEEN_AGAIN, SHIFT, Walk, spread
from prefixpool.wire import Tier

SHARDS: Final = 256
LOW: Final = SHARDS - 1
HOLDERS: Final = -1 << SHIFT  # everything but depth and flag
STRIDE: Final = 8
GIVE_UP: Final = 64  # unknown boundaries in a row after which a walk ends even if they may have been evicted
HASH_BYTES: Final = 36  # a 64-bit int object
DICT_BYTES: Final = 62  # one slot of a dict, at the mean load between two resizes


def capacity(budget_bytes: int, columns: int) -> int:
    """How many boundaries fit into a budget, if every value grows to the width of all columns (bench/memory.py)."""
    return max(SHARDS, budget_bytes // (HASH_BYTES + DICT_BYTES + _value_bytes(columns)))


def _value_bytes(columns: int) -> int:
    return 28 + 4 * ((SHIFT + 3 * columns) // 30)


class PrefixIndex:
    """Not thread-safe: one owner. `capacity` bounds the number of boundaries, `evicted` counts those it cost."""

    def __init__(self, capacity: int) -> None:
        self.evicted = 0
        self._shards: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        self._full = max(1, capacity // SHARDS)
        self._disk = bytearray(SHARDS)  # 1: this shard may have boundaries that only disks hold
        self._live = 0  # bit 3 * column of every open column
        self._counts: list[int] = []
        self._free: list[int] = []
        self._stores: dict[str, int] = {}  # disk bits of the columns that have it
        self._shared: tuple[int, ...] = ()  # the same, of those that several have
        self._dead: list[tuple[int, int]] = []  # (dropped column, shards still to clean)

    def __len__(self) -> int:
        """Boundaries, those of dropped columns included until they are swept."""
        return sum(map(len, self._shards))

    @property
    def approximate_bytes(self) -> int:
        """Memory of the index; a few microseconds."""
        return sum(map(sys.getsizeof, self._shards)) + len(self) * (HASH_BYTES + _value_bytes(len(self._counts)))

    def count(self, column: int) -> int:
        """Boundaries that a column holds in any tier."""
        return self._counts[column]

    # -- columns

    def open_column(self) -> int:
        """An empty column for a (re)started replica."""
        if self._free:
            column = self._free.pop()
        else:
            column = len(self._counts)
            self._counts.append(0)
        self._live |= 1 << 3 * column
        return column

    def drop_column(self, column: int) -> None:
        """Forget a replica at once; call `sweep()` until it returns False to free its bits.

        Raises ValueError if the column is not open.
        """
        if not self._live >> 3 * column & 1:
            raise ValueError(f"column {column} is not open")
        self._live &= ~(1 << 3 * column)
        self.mount(column, "")
        self._dead.append((column, SHARDS))

    def mount(self, column: int, store: str) -> None:
        """Its disk is a store that other columns may have, too: what any of them holds there, each of them holds, as long as
        one of those who said so is there. "": a disk of its own.
        """
        disk = 0b100 << 3 * column
        stores = {name: disks & ~disk for name, disks in self._stores.items()}
        if store:
            stores[store] = stores.get(store, 0) | disk
        self._stores = {name: disks for name, disks in stores.items() if disks}
        self._shared = tuple(disks for disks in self._stores.values() if disks & disks - 1)

    def sweep(self) -> bool:
        """Do one small step of cleaning (one shard, some ms at most); True while more is left."""
        if not self._dead:
            return False
        column, left = self._dead[0]
        if self._counts[column]:
            left -= 1
            self._clear(column, list(self._shards[left]), 0b111)
        if left and self._counts[column]:
            self._dead[0] = column, left
        else:
            del self._dead[0]
            self._free.append(column)
        return bool(self._dead)

    # -- residency

    def add(self, column: int, hashes: Sequence[int], depths: Sequence[int], tier: Tier) -> None:
        """Record boundaries with their token depths; of several the last word holds, since agents learn.

        Adding one again spares it from eviction once.
        """
        shards, full = self._shards, self._full
        base = SHIFT + 3 * column
        own, bit, new = 0b111 << base, 1 << base + tier - 1, 0
        for key, depth in zip(hashes, depths, strict=True):
            shard = shards[key & LOW]
            value = shard.get(key)
            if value is None:
                if len(shard) >= full:
                    self._evict(key & LOW)
                value = min(depth, MAX_DEPTH)
                if tier == Tier.DISK:
                    self._disk[key & LOW] = 1
            else:
                value = value & HOLDERS | SEEN_AGAIN | (depth if depth < MAX_DEPTH else MAX_DEPTH)
            new += not value & own
            shard[key] = value | bit
        self._counts[column] += new

    def remove(self, column: int, hashes: Iterable[int], tier: Tier) -> None:
        """Clear one tier of one replica. Unknown boundaries are ignored."""
        self._clear(column, hashes, 1 << tier - 1)

    def walk(self, hashes: Sequence[int], block_tokens: int, overlay: Mapping[int, int] | None = None) -> Walk:
        """How far anybody holds a prefix, and who. `overlay`: `Predicted.marks`.

        Boundaries shallower than one block count as always held, and one that this index itself may have evicted says
        nothing; apart from those, the first boundary that a column lacks ends its prefix.

        Between two boundaries `STRIDE` apart with the same holders none is looked up. Agents publish a boundary only if its
        whole path is resident, so nothing can be missing there; if ever it were, a hole of `STRIDE` or more would be seen.
        """
        position, end = self._root(hashes, block_tokens, overlay), len(hashes) - 1
        walk = Walk(self._live, self._shared)
        if position < 0 or not walk.step(self._value(hashes[position], overlay), position):
            return walk
        unknown, shards = 0, self._shards
        while position < end:
            jump = position + STRIDE
            if jump > end:
                jump = end
            key = hashes[jump]
            value = shards[key & LOW].get(key, 0)  # `_value`, spelt out for speed
            if overlay and (extra := overlay.get(key)):
                value = value | extra & HOLDERS if value else extra
            if value >> SHIFT == walk.mask:
                walk.last, walk.reached, position = value, jump, jump
                continue
            for at, value in enumerate(self._values(hashes[position + 1 : jump + 1], overlay), position + 1):
                if value and not walk.step(value, at):
                    return walk
                unknown = 0 if value else unknown + 1
                if unknown and not (self.evicted and unknown < GIVE_UP):
                    walk.end()
                    return walk
            position = jump
        walk.end()
        return walk

    def depth(self, key: int, columns: int) -> int:
        """Token depth of a boundary that any of `columns` holds, in any tier; 0: unknown."""
        value = self._shards[key & LOW].get(key, 0)
        holders = spread(value >> SHIFT, self._shared) if value else 0
        return value & MAX_DEPTH if columns & (holders | holders >> 1 | holders >> 2) else 0

    def _root(self, hashes: Sequence[int], block_tokens: int, overlay: Mapping[int, int] | None) -> int:
        """Where the first boundary is that is known and at least one block deep; -1: there is none.

        Nearly every boundary is at least one token behind the one before, so that many unknown ones are a block.
        """
        unknown, most = 0, min(block_tokens, GIVE_UP)
        for position, key in enumerate(hashes):
            value = self._value(key, overlay)
            if not value:
                unknown += 1
                if unknown > most:
                    break
            elif value & MAX_DEPTH >= block_tokens:
                return position
        return -1

    def _value(self, key: int, overlay: Mapping[int, int] | None) -> int:
        """What is known of a boundary; 0: nothing."""
        value = self._shards[key & LOW].get(key, 0)
        if overlay and (extra := overlay.get(key)):
            return value | extra & HOLDERS if value else extra
        return value

    def _values(self, keys: Sequence[int], overlay: Mapping[int, int] | None) -> list[int]:
        """The same of several."""
        shards = self._shards
        values = [shards[key & LOW].get(key, 0) for key in keys]
        if not overlay:
            return values
        extras = map(overlay.get, keys, repeat(0))
        return [value | extra & HOLDERS if value else extra for value, extra in zip(values, extras, strict=True)]

    # -- inside

    def _clear(self, column: int, hashes: Iterable[int], tiers: int) -> None:
        shards, base = self._shards, SHIFT + 3 * column
        own, bits, gone = 0b111 << base, tiers << base, 0
        for key in hashes:
            shard = shards[key & LOW]
            value = shard.get(key, 0)
            if not value & bits:
                continue
            rest = value & ~bits
            gone += not rest & own
            if rest >> SHIFT:
                shard[key] = rest
                self._disk[key & LOW] = 1  # what is left may be on disks only
            else:
                del shard[key]
        self._counts[column] -= gone

    def _evict(self, number: int) -> None:
        """Make room for one: the deepest boundaries that only disks hold; else the older and deeper ones first.

        In batches: a scan of the shard frees a sixteenth of it, and walking a dict from the front steps over deleted slots.
        """
        shard, batch = self._shards[number], max(1, self._full // 16)
        if self._disk[number]:
            near = (self._live | self._live << 1) << SHIFT
            disk_only = [key for key, value in shard.items() if not value & near]
            self._disk[number] = len(disk_only) > batch
            for key in nlargest(batch, disk_only, key=lambda key: shard[key] & MAX_DEPTH):
                self._forget(shard.pop(key))
        while len(shard) >= self._full:
            self._evict_old(shard)

    def _evict_old(self, shard: dict[int, int]) -> None:
        """Of the oldest, those seen again get a second chance; of the others the shallower half does: heads are shared."""
        oldest = [(key, shard.pop(key)) for key in list(islice(shard, 32))]
        unseen = sorted((value & MAX_DEPTH for _, value in oldest if not value & SEEN_AGAIN), reverse=True)
        spared = unseen[(len(unseen) - 1) // 2] if unseen else 0
        for key, value in oldest:
            if value & SEEN_AGAIN:
                shard[key] = value ^ SEEN_AGAIN
            elif value & MAX_DEPTH < spared:
                shard[key] = value
            else:
                self._forget(value)

    def _forget(self, value: int) -> None:
        self.evicted += 1
        holders = value >> SHIFT
        while holders:
            column = ((holders & -holders).bit_length() - 1) // 3
            self._counts[column] -= 1
            holders &= ~(0b111 << 3 * column)
