"""Copies on the device that may exist: an event said that a block was stored which is there already. Pure.

Two requests may have computed it at once, which makes a second copy, or one event was told twice. Until that is known such a
copy is not counted, but a removal may mean it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from prefixpool_agent.residency.block import Block


class SuspectedCopies:
    """By block."""

    def __init__(self) -> None:
        self._suspected: Counter[Block] = Counter()
        self._spent: Counter[Block] = Counter()  # of these, removed already: one of them was real, not known which

    def add(self, blocks: Sequence[Block]) -> None:
        self._suspected.update(blocks)

    def settle(self, block: Block, real: bool) -> bool:
        """One of the block's turns out to be real, or not. Returns whether that is a copy which is there now.

        A removal says that one of those suspected was real. So it uses up the next that proves real, not one that does not.
        """
        suspected = self._suspected.pop(block, 0)
        if not suspected:
            return False  # forgotten since then, or cleared
        spent = self._spent.pop(block, 0)
        if suspected > 1:
            self._suspected[block] = suspected - 1
        if (left := min(spent - real, suspected - 1)) > 0:
            self._spent[block] = left
        return real and not spent

    def spend(self, block: Block) -> bool:
        """A copy was removed that is not counted; False if none is suspected."""
        unspent = self._spent[block] < self._suspected[block]
        if unspent:
            self._spent[block] += 1
        return unspent

    def forget(self, block: Block) -> None:
        self._suspected.pop(block, None)
        self._spent.pop(block, None)

    def clear(self) -> None:
        self._suspected.clear()
        self._spent.clear()
