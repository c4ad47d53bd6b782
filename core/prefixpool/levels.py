"""What one walk down a prompt's boundaries finds, for all replicas at once. Pure.

A boundary's value is one int (see index.py): bits 0..22 token depth, bit 23 a flag, from bit 24 on 3 bits a column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

SHIFT: Final = 24
SEEN_AGAIN: Final = 1 << 23
MAX_DEPTH: Final = SEEN_AGAIN - 1


class Level(NamedTuple):
    """Holders of a prefix of `tokens` tokens. A holder's bit is `1 << 3 * column`. Levels shrink with depth."""

    tokens: int
    device: int  # columns that hold the whole prefix on the device tier
    host: int  # columns that hold it in host memory or nearer
    held: int  # columns that hold it in any tier


def spread(holders: int, shared: Sequence[int]) -> int:
    """What one of those who share a store is said to hold on disk, all of them hold."""
    for disks in shared:
        if holders & disks:
            holders |= disks
    return holders


class Walk:
    """The columns that hold everything so far, while boundaries go by from shallow to deep.

    `levels`: from shallow to deep; a column's depth is that of the last one it is in. `reached`: index of the deepest
    boundary that is held, -1 if none is; `last`: its value.
    """

    __slots__ = ("device", "held", "host", "last", "levels", "mask", "reached", "shared")

    def __init__(self, live: int, shared: Sequence[int]) -> None:
        self.device = self.host = self.held = live
        self.shared = shared
        self.mask = self.last = 0
        self.reached = -1
        self.levels: list[Level] = []

    def step(self, value: int, position: int) -> bool:
        """The next known boundary; False: nobody holds it, `levels` is complete."""
        if (holders := value >> SHIFT) != self.mask:
            self.mask = holders
            if self.shared:
                holders = spread(holders, self.shared)
            near = holders | holders >> 1
            device, host, held = self.device & holders, self.host & near, self.held & (near | holders >> 2)
            if (device, host, held) != (self.device, self.host, self.held):
                self.end()
            self.device, self.host, self.held = device, host, held
        if self.held:
            self.last, self.reached = value, position
        return self.held != 0

    @property
    def depth(self) -> int:
        """Tokens that are held."""
        return self.last & MAX_DEPTH

    def end(self) -> None:
        """Close the level in progress."""
        if self.last:
            self.levels.append(Level(self.last & MAX_DEPTH, self.device, self.host, self.held))
