"""Which replica holds which boundary, in which tier: one index for all replicas (research: prefix_index.md)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from prefixpool.wire import Tier


class Level(NamedTuple):
    """Holders of a prefix of `tokens` tokens. A holder's bit is `1 << 3 * column`. Levels shrink with depth."""

    tokens: int
    device: int  # columns that hold the whole prefix on the device tier
    held: int  # columns that hold it in any tier


class PrefixIndex:
    """Not thread-safe: one owner. `capacity` bounds the number of boundaries (see bytes_per_boundary in bench)."""

    def __init__(self, capacity: int) -> None:
        raise NotImplementedError

    def open_column(self) -> int:
        """An empty column for a (re)started replica."""
        raise NotImplementedError

    def drop_column(self, column: int) -> None:
        """Forget a replica at once; call `sweep()` until it returns False to free its bits."""
        raise NotImplementedError

    def sweep(self) -> bool:
        """Do one small step of cleaning; True while more is left."""
        raise NotImplementedError

    def add(self, column: int, hashes: Sequence[int], depths: Sequence[int], tier: Tier) -> None:
        """Record boundaries with their token depths."""
        raise NotImplementedError

    def remove(self, column: int, hashes: Iterable[int], tier: Tier) -> None:
        """Clear one tier of one replica."""
        raise NotImplementedError

    def match(self, hashes: Sequence[int], block_tokens: int) -> list[Level]:
        """Levels from shallow to deep. Boundaries shallower than one block count as always held."""
        raise NotImplementedError
