"""The paged block pool of the device tier: reference counts, prefix cache, LRU eviction, as vLLM's BlockPool. Pure.

Each block holds what stands for its keys and values: the token ids, and once full a digest chained over the *physical*
block before it. Replies are derived from these contents, so a block that is reused wrongly changes the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, Final

import msgspec

from prefixpool_agent.sim.blockhash import external

MEDIUM_DEVICE: Final = "GPU"
MEDIUM_HOST: Final = "CPU"
GROUP: Final = 0  # one KV cache group: full attention

Event = dict[str, Any]


class Block:
    """One physical block. `previous` and `next` link the free queue; both None while in use."""

    __slots__ = ("content", "digest", "id", "next", "previous", "refs", "state")

    def __init__(self, id_: int) -> None:
        self.id = id_
        self.refs = 0
        self.digest: bytes | None = None  # key in the prefix cache
        self.content: list[int] = []  # token ids whose KV is computed
        self.state = b""  # of the full block: digest of the contents from the root to here
        self.previous: Block | None = None
        self.next: Block | None = None

    def fill(self, before: Block | None, tokens: Sequence[int], block_tokens: int) -> None:
        """Compute KV for these tokens on top of the block that really lies before."""
        self.content.extend(tokens)
        if len(self.content) == block_tokens:
            self.state = digest_of(before.state if before else b"", self.content)


def digest_of(state: bytes, content: Sequence[int]) -> bytes:
    """What attention would see behind `state` and the tokens after it, in 16 bytes."""
    return blake2b(state + msgspec.msgpack.encode(content), digest_size=16).digest()


class FreeQueue:
    """Doubly linked list of free blocks, first to be reused first; O(1) removal from the middle."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._head, self._tail = Block(-1), Block(-2)
        self._head.next, self._tail.previous = self._tail, self._head
        self.count = 0
        for block in blocks:
            self.append(block)

    def append(self, block: Block) -> None:
        last = self._tail.previous
        assert last is not None
        self._insert(last, block)

    def prepend(self, block: Block) -> None:
        self._insert(self._head, block)

    def pop(self) -> Block:
        """The next block to reuse. Raises IndexError if there is none."""
        first = self._head.next
        if first is None or first is self._tail:
            raise IndexError("no free block")
        self.remove(first)
        return first

    def remove(self, block: Block) -> None:
        before, after = block.previous, block.next
        assert before is not None
        assert after is not None
        before.next, after.previous = after, before
        block.previous = block.next = None
        self.count -= 1

    def _insert(self, before: Block, block: Block) -> None:
        after = before.next
        assert after is not None
        before.next, after.previous = block, block
        block.previous, block.next = before, after
        self.count += 1


class BlockPool:
    """Blocks of the device. Block 0 is the null block and never used, as in vLLM."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.usable = blocks - 1
        self._blocks = [Block(i) for i in range(1, blocks)]
        self._free = FreeQueue(self._blocks)
        self._cached: dict[bytes, dict[int, Block]] = {}  # copies are not merged: block tables only grow
        self._events: list[Event] = []

    @property
    def free_blocks(self) -> int:
        return self._free.count

    @property
    def usage(self) -> float:
        """Fraction of blocks that running requests hold."""
        return 1.0 - self._free.count / self.usable if self.usable else 0.0

    def cached(self, digest: bytes) -> Block | None:
        copies = self._cached.get(digest)
        return next(iter(copies.values())) if copies else None

    def match(self, digests: Sequence[bytes], max_blocks: int) -> list[Block]:
        """The longest cached prefix, not longer than `max_blocks`."""
        found: list[Block] = []
        for digest in digests[:max_blocks]:
            block = self.cached(digest)
            if block is None:
                break
            found.append(block)
        return found

    def needs(self, total_blocks: int, hits: Sequence[Block], held: int) -> int:
        """Free blocks that a request takes: new ones, and hits that nobody else holds."""
        return total_blocks - held - len(hits) + sum(block.refs == 0 for block in hits)

    def touch(self, blocks: Iterable[Block]) -> None:
        """One more request holds these."""
        for block in blocks:
            if block.refs == 0:
                self._free.remove(block)
            block.refs += 1

    def allocate(self, count: int) -> list[Block]:
        """New blocks; what they held is evicted. Raises IndexError if there are too few."""
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._evict(block)
            block.refs, block.content, block.state = 1, [], b""
        return taken

    def publish(self, block: Block, digest: bytes) -> None:
        """The block can be found in the prefix cache from now on."""
        block.digest = digest
        self._cached.setdefault(digest, {})[block.id] = block

    def release(self, blocks: Sequence[Block]) -> None:
        """A request gives its blocks back: the tail is evicted first, blocks without a hash before all others."""
        for block in reversed(blocks):
            block.refs -= 1
            if block.refs == 0:
                (self._free.append if block.digest is not None else self._free.prepend)(block)

    def reset(self) -> bool:
        """Forget the prefix cache; refused while requests hold blocks. The event waits for the next step, as in vLLM."""
        if self._free.count != self.usable:
            return False
        for block in self._blocks:
            block.digest = None
        self._cached.clear()
        self._events.append({"type": "AllBlocksCleared"})
        return True

    def note(self, event: Event) -> None:
        self._events.append(event)

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _evict(self, block: Block) -> None:
        if block.digest is None:
            return
        copies = self._cached.get(block.digest, {})
        if copies.pop(block.id, None) is not None:
            self._events.append(removed(block.digest, MEDIUM_DEVICE))
        if not copies:
            self._cached.pop(block.digest, None)
        block.digest = None


def removed(digest: bytes, medium: str) -> Event:
    """`BlockRemoved` of one block."""
    return {"type": "BlockRemoved", "block_hashes": [external(digest)], "medium": medium, "group_idx": GROUP}
