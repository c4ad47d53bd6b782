"""Consistent hashing with bounded loads: every router sends the same new prefix to the same place, but never to a full one.

Source: Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads" (2016); constants: research algorithms.md 1.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Iterator
from math import ceil
from typing import Final, NamedTuple

import mmh3

VNODES: Final = 160  # points of one member: the largest of 64 shares is then less than BOUND times the mean
OWNER: Final = (1 << 16) - 1  # low bits of a point: whose it is
POINT: Final = (1 << 64) - 1 - OWNER
BOUND: Final = 1.25  # a member takes at most this many times the mean
SLACK: Final = 1  # and this many more, so that a nearly idle pool does not scatter equal prefixes


class Placement(NamedTuple):
    """Where a key went and how: `steps` members were passed over because they did not accept."""

    first: str  # the key's owner among those that are eligible
    final: str
    steps: int


def bound(total: int, members: int) -> int:
    """Most requests in flight that one member may have, the next one included; `total` in flight without it."""
    return ceil(BOUND * (total + 1) / members) + SLACK


class Ring:
    """Immutable. Members come and go by building another ring: only the keys of that member move, about 1/n of all.

    `vnodes` is even. Building one of 64 members takes some 5 ms.
    """

    def __init__(self, names: Iterable[str], vnodes: int = VNODES) -> None:
        self.names = tuple(sorted(set(names)))
        self._points = array(
            "Q",
            sorted(
                point & POINT | owner
                for owner, name in enumerate(self.names)
                for i in range(0, vnodes, 2)
                for point in mmh3.hash64(f"{name}#{i}".encode(), signed=False)
            ),
        )

    def walk(self, key: int) -> Iterator[str]:
        """All members once, in the order in which they are asked to take `key` (64 bits, unsigned)."""
        points, names = self._points, self.names
        size, left = len(points), len(names)
        at, seen = bisect_right(points, key), 0
        while left:
            owner = points[at % size] & OWNER
            at += 1
            if not seen >> owner & 1:
                seen |= 1 << owner
                left -= 1
                yield names[owner]

    def place(self, key: int, eligible: Container[str], accepts: Callable[[str], bool]) -> Placement:
        """The first eligible member on the walk that accepts; `final` is empty if none does."""
        first, steps = "", 0
        for name in self.walk(key):
            if name not in eligible:
                continue
            first = first or name
            if accepts(name):
                return Placement(first, name, steps)
            steps += 1
        return Placement(first, "", steps)
