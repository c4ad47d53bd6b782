"""Blocks of whose texts others may not know: what was learned here, and what this engine wrote to disk. Pure, bounded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

MOST: Final = 65_536  # blocks: some seconds of the fastest engine's; where there is no disk nobody takes them


class News:
    """Hashes of blocks since they were last taken; the oldest are forgotten first."""

    def __init__(self) -> None:
        self._blocks: dict[int, None] = {}

    def add(self, hashes: Iterable[int]) -> None:
        """Once more, or for the first time."""
        for hash_ in hashes:
            self._blocks.pop(hash_, None)
            self._blocks[hash_] = None
            if len(self._blocks) > MOST:
                del self._blocks[next(iter(self._blocks))]

    def take(self) -> list[int]:
        """The oldest first."""
        taken, self._blocks = self._blocks, {}
        return list(taken)
