"""The engine's blocks as a trie that follows its KV events: parents, token ids, copies per tier. Pure."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from prefixpool.wire import Tier
from prefixpool_agent.residency.block import UNPLACED, Block
from prefixpool_agent.residency.kv_event import Stored
from prefixpool_agent.residency.suspected import SuspectedCopies


class Watcher(Protocol):
    """Who hangs facts on blocks."""

    def changing(self, block: Block) -> None:
        """The block's level, or whether it is stored, is about to change."""

    def placed(self, block: Block) -> None:
        """The block's path to the root has become known."""

    def dropped(self, block: Block) -> None:
        """The block is forgotten."""


class BlockTrie:
    """All blocks that are somewhere, or lead to one that is. `limit` bounds their number."""

    def __init__(self, block_tokens: int, limit: int, watcher: Watcher, counts: Counter[str]) -> None:
        self.root = Block(0)
        self.root.blocks, self.root.level, self.root.stored = 0, Tier.DEVICE, True
        self._block_tokens = block_tokens
        self._limit = limit
        self._refuse: Counter[Tier] = Counter()  # new blocks to refuse before room is sought again for that tier
        self._watcher = watcher
        self._counts = counts
        self._blocks: dict[int, Block] = {}
        self.on_device = 0  # blocks with a copy there
        self._suspected = SuspectedCopies()

    def __len__(self) -> int:
        return len(self._blocks)

    def resident(self) -> Counter[Tier]:
        """Blocks that a request could reuse now, by the tier that serves them; walks all."""
        levels = Counter(block.level for block in self._blocks.values())
        del levels[Tier.ABSENT]
        return levels

    def alive(self, block: Block) -> bool:
        """Still part of the trie; the root is."""
        return block is self.root or self._blocks.get(block.hash) is block

    def stored(self, event: Stored) -> tuple[Block | None, list[Block]]:
        """Apply one event. Returns its last block (None: nothing placed), and which were on the device already.

        Whether these have one copy more only the caller can know: `add_copies`, `suspect`, or nothing.
        """
        size = self._block_tokens
        if any(hash_ not in self._blocks for hash_ in event.hashes) and not self._has_room(len(event.hashes), event.tier):
            return None, []
        if not event.tokens:
            for hash_ in event.hashes:
                self._own(self._get(hash_), event.tier)
            self._counts["placeholder_blocks"] += len(event.hashes)
            return None, []
        if len(event.tokens) != size * len(event.hashes):
            self._counts["odd_block_size"] += 1
            return None, []
        again: list[Block] = []
        parent = self.root if event.parent is None else self._get(event.parent)
        for i, hash_ in enumerate(event.hashes):
            block = self._get(hash_)
            self._place(block, parent, event.tokens[i * size : (i + 1) * size])
            if block.device and event.tier is Tier.DEVICE:
                again.append(block)
            self._own(block, event.tier)
            parent = block
        return parent, again

    def on_disk(self, hash_: int, parent: int | None) -> None:
        """A block that lies on disk, its tokens unknown until an event tells them."""
        if hash_ not in self._blocks and not self._has_room(1, Tier.DISK):
            return
        block = self._get(hash_)
        self._place(block, self.root if parent is None else self._get(parent), None)
        self._own(block, Tier.DISK)

    def placed(self, hash_: int) -> Block | None:
        """A block whose path to the root is known."""
        block = self._blocks.get(hash_)
        return block if block is not None and block.blocks != UNPLACED else None

    def add_copies(self, blocks: Sequence[Block]) -> None:
        """One physical copy more on the device, of each of these."""
        for block in blocks:
            self.on_device += not block.device
            block.device += 1
            self._relevel(block)

    def suspect(self, blocks: Sequence[Block]) -> None:
        """Perhaps one copy more of each of these: not counted until `settle` tells, but a removal may mean it."""
        self._suspected.add(blocks)

    def settle(self, blocks: Sequence[Block], real: bool) -> None:
        """What was suspected is a copy, unless it was removed meanwhile, or it never was one."""
        for block in blocks:
            if self._suspected.settle(block, real):
                self.add_copies([block])

    def removed(self, hashes: Sequence[int], tier: Tier) -> None:
        """One copy of each of these is gone."""
        for hash_ in hashes:
            block = self._blocks.get(hash_)
            if block is None or not block.has(tier):
                suspected = block is not None and tier is Tier.DEVICE and self._suspected.spend(block)
                self._counts["removed_unknown"] += not suspected
                continue
            if tier is Tier.DEVICE:
                block.device -= 1
                self.on_device -= not block.device
            elif tier is Tier.HOST:
                block.host = False
            else:
                block.disk = False
            self._relevel(block)
            self._prune(block)

    def cleared(self, external: bool) -> None:
        """The device tier is empty; `external`: host memory, too. What is on disk stays, vLLM never resets that."""
        self._suspected.clear()
        self.on_device = 0
        for block in self._blocks.values():
            block.device = 0
            if external:
                block.host = False
        for block in self._blocks.values():  # not from the root on: what is served from disk is so still, not all behind it
            self._relevel(block)
        for block in list(self._blocks.values()):
            self._prune(block)

    def reset(self) -> None:
        """Nothing is known any more."""
        for block in self._blocks.values():
            self._watcher.dropped(block)
        self._blocks.clear()
        self.on_device = 0
        self._suspected.clear()
        self.root.first = None
        self._refuse.clear()

    def _get(self, hash_: int) -> Block:
        block = self._blocks.get(hash_)
        if block is None:
            block = self._blocks[hash_] = Block(hash_)
        return block

    def _has_room(self, wanted: int, tier: Tier) -> bool:
        """Sought before an event is applied, never in the middle of one: a sweep takes blocks that lead nowhere yet.

        What is served from farther away yields: a large disk must not keep what is new on the device from being known.
        """
        if len(self._blocks) < self._limit:
            return True
        if self._refuse[tier] > 0:
            self._refuse[tier] -= wanted
            self._counts["blocks_refused"] += wanted
            return False
        # First what serves nobody now; all below it is absent, too.
        self._drop_all([block for block in self._blocks.values() if block.level is Tier.ABSENT])
        for farther in (Tier.DISK, Tier.HOST):
            if farther > tier and len(self._blocks) >= self._limit:
                self._drop_deepest(farther)
        self._refuse[tier] = self._limit // 16 if len(self._blocks) >= self._limit else 0
        return len(self._blocks) < self._limit

    def _drop_deepest(self, level: Tier) -> None:
        """Some of those that are served from there; what is behind a block goes before it."""
        blocks = sorted((block for block in self._blocks.values() if block.level is level), key=_depth, reverse=True)
        self._drop_all(blocks[: max(1, self._limit // 16)])

    def _drop_all(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._drop(block)
        self._counts["blocks_dropped"] += len(blocks)

    def _place(self, block: Block, parent: Block, tokens: array[int] | None) -> None:
        if block.tokens is None:
            block.tokens = tokens
        if block.parent is not None or block is parent:
            return
        block.attach(parent)
        self._index(block)

    def _index(self, top: Block) -> None:
        """A path became known: so did those of all blocks behind it."""
        todo = [top]
        while todo:
            block = todo.pop()
            parent = block.parent
            if parent is None or parent.blocks == UNPLACED or block.blocks != UNPLACED:
                continue
            block.blocks = parent.blocks + 1
            self._watcher.placed(block)
            todo.extend(block.children())
        self._relevel(top)

    def _own(self, block: Block, tier: Tier) -> None:
        if tier is Tier.DEVICE:
            self.on_device += not block.device
            block.device = block.device or 1
        elif tier is Tier.HOST:
            block.host = True
        else:
            block.disk = True
        self._relevel(block)

    def _relevel(self, top: Block) -> None:
        todo = [top]
        while todo:
            block = todo.pop()
            level, stored = block.served_from(), block.disk and block.parent is not None and block.parent.stored
            if (level, stored) != (block.level, block.stored):
                self._watcher.changing(block)
                block.level, block.stored = level, stored
                todo.extend(block.children())

    def _prune(self, block: Block) -> None:
        """Forget blocks that are nowhere and lead to nothing; a hole above a resident block stays, it may come back."""
        at: Block | None = block
        while at and at is not self.root and not (at.device or at.host or at.disk or at.first) and self.alive(at):
            parent = at.parent
            self._drop(at)
            at = parent

    def _drop(self, block: Block) -> None:
        self._watcher.dropped(block)
        del self._blocks[block.hash]
        self.on_device -= block.device > 0
        self._suspected.forget(block)
        block.detach()


def _depth(block: Block) -> int:
    return block.blocks
