"""One of the engine's blocks: where copies of it are, and its place among the others. Pure.

A block's *level* is the tier from which its whole path is served, and ABSENT if the path has a hole. The engine walks a
prefix from the root: device blocks until the first miss, then lower tiers from there on. So a device block behind a host
block serves nobody, and a level never gets nearer with depth. A block is *stored* if its whole path is on disk, wherever it
is besides: then any replica that has the same disk can read it.

Copies on the device are counted, because two requests that compute the same block at once store it twice and later remove
it twice. Lower tiers are maps in the engine, hence sets here.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Final

from prefixpool.wire import Tier

UNPLACED: Final = -1  # Block.blocks: the path to the root is not known


class Block:
    """One block; a placeholder while only its hash is known (no tokens), or its parent is not known (no parent)."""

    __slots__ = (
        "blocks",
        "device",
        "disk",
        "facts",
        "first",
        "hash",
        "host",
        "level",
        "next",
        "parent",
        "previous",
        "stored",
        "tokens",
    )

    def __init__(self, hash_: int) -> None:
        self.hash = hash_
        self.parent: Block | None = None
        self.blocks = UNPLACED  # length of the path from the root, itself included
        self.tokens: array[int] | None = None
        self.device = 0  # physical copies
        self.host = False
        self.disk = False
        self.level = Tier.ABSENT
        self.stored = False
        self.facts: list[int] | None = None  # owned by boundaries.BoundaryMap
        # Children as a linked list: nearly all blocks have one child, and a dictionary for one costs 200 bytes.
        self.first: Block | None = None
        self.next: Block | None = None
        self.previous: Block | None = None

    def children(self) -> Iterator[Block]:
        """In no order; the tree must not change meanwhile."""
        child = self.first
        while child:
            yield child
            child = child.next

    def path(self) -> list[Block]:
        """From the root's child to this block; only for placed blocks."""
        out: list[Block] = []
        block = self
        while block.parent is not None:
            out.append(block)
            block = block.parent
        out.reverse()
        return out

    def has(self, tier: Tier) -> bool:
        if tier is Tier.DEVICE:
            return self.device > 0
        return self.host if tier is Tier.HOST else self.disk

    def served_from(self) -> Tier:
        """Its level, by that of its parent."""
        above = self.parent.level if self.parent else Tier.ABSENT
        if above is Tier.ABSENT:
            return Tier.ABSENT
        if above is Tier.DEVICE and self.device:
            return Tier.DEVICE
        if self.host:
            return Tier.DISK if above is Tier.DISK else Tier.HOST
        return Tier.DISK if self.disk else Tier.ABSENT

    def attach(self, parent: Block) -> None:
        """Becomes a child."""
        self.parent = parent
        self.next = parent.first
        if parent.first:
            parent.first.previous = self
        parent.first = self

    def detach(self) -> None:
        """Is none any more; `parent` stays, for who still holds the block."""
        if self.next:
            self.next.previous = self.previous
        if self.previous:
            self.previous.next = self.next
        elif self.parent:
            self.parent.first = self.next
        self.next = self.previous = None
