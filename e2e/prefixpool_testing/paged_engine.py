"""A paged prefix cache for tests of the residency join: vLLM's block pool and its KV events, without any engine around it.

Blocks are allocated from an LRU queue of free ones; a cached block is announced when it is stored and when its space is
given to another, one event per physical copy. Requests may overlap: `begin` prefills, `finish` decodes and frees.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]


def chain_hash(parent: int, tokens: list[int], salt: str = "") -> int:
    """64 bits over the whole prefix, as an engine's block hash."""
    data = parent.to_bytes(8, "big") + b"".join(token.to_bytes(4, "big") for token in tokens) + salt.encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


@dataclass
class Running:
    """A request inside the engine."""

    id: str
    tokens: list[int]
    salt: str
    cached: int
    full: bool
    blocks: list[int] = field(default_factory=list)  # physical
    hashes: list[int] = field(default_factory=list)  # of full blocks


class PagedEngine:
    """`events` collects what an engine would publish, in order; the test takes them away."""

    def __init__(self, blocks: int, block_tokens: int, host_blocks: int = 0, chunk_tokens: int = 256) -> None:
        self.block_tokens = block_tokens
        self.events: list[Event] = []
        self._host_blocks = host_blocks
        self._chunk = chunk_tokens // block_tokens
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self._refs = dict.fromkeys(range(blocks), 0)
        self._hash_of: dict[int, int] = {}
        self._cached: dict[int, OrderedDict[int, None]] = {}
        self._host: OrderedDict[int, None] = OrderedDict()

    def hashes(self, tokens: list[int], salt: str = "") -> list[int]:
        """Of all full blocks."""
        out: list[int] = []
        parent, size = 0, self.block_tokens
        for at in range(0, len(tokens) - size + 1, size):
            parent = chain_hash(parent, tokens[at : at + size], "" if at else salt)
            out.append(parent)
        return out

    def match(self, tokens: list[int], salt: str = "") -> int:
        """Cached tokens that a request with this prompt would be told."""
        hashes = self.hashes(tokens, salt)[: (len(tokens) - 1) // self.block_tokens]
        hit = next((i for i, h in enumerate(hashes) if h not in self._cached), len(hashes))
        while hit < len(hashes) and hashes[hit] in self._host:
            hit += 1
        return hit * self.block_tokens

    def begin(self, id_: str, tokens: list[int], *, salt: str = "", full: bool = False) -> Running:
        """Match, allocate, prefill; raises MemoryError when running requests hold too much."""
        run = Running(id_, list(tokens), salt, self.match(tokens, salt), full)
        hashes = self.hashes(tokens, salt)
        for hash_ in hashes[: run.cached // self.block_tokens]:
            if hash_ not in self._cached:
                break  # on the host: brought back into blocks of its own below
            block = next(iter(self._cached[hash_]))
            self._free.pop(block, None)
            self._refs[block] += 1
            run.blocks.append(block)
        reused = len(run.blocks)
        run.hashes = hashes[:reused]
        if full and reused:
            self._announce(run, 0, reused)
        self._grow(run, len(tokens))
        self._store(run, reused, hashes)
        return run

    def finish(self, run: Running, output: list[int]) -> None:
        """Decode these tokens (the last one is sampled, never computed), then free the blocks, last one first."""
        for token in output[:-1]:
            run.tokens.append(token)
            self._grow(run, len(run.tokens))
            if len(run.tokens) % self.block_tokens == 0:
                self._store(run, len(run.hashes), self.hashes(run.tokens, run.salt))
        for block in reversed(run.blocks):
            self._refs[block] -= 1
            if not self._refs[block]:
                self._free[block] = None

    def reset(self) -> None:
        """As `/reset_prefix_cache` on an idle engine; the event is published by the next step."""
        self._cached.clear()
        self._hash_of.clear()
        self.events.append({"type": "AllBlocksCleared"})

    def _grow(self, run: Running, tokens: int) -> None:
        while len(run.blocks) * self.block_tokens < tokens:
            if not self._free:
                raise MemoryError
            block, _ = self._free.popitem(last=False)
            self._evict(block)
            self._refs[block] = 1
            run.blocks.append(block)

    def _evict(self, block: int) -> None:
        hash_ = self._hash_of.pop(block, None)
        if hash_ is None:
            return
        del self._cached[hash_][block]
        if not self._cached[hash_]:
            del self._cached[hash_]
        self.events.append({"type": "BlockRemoved", "block_hashes": [hash_], "medium": "GPU", "group_idx": 0})

    def _store(self, run: Running, first: int, hashes: list[int]) -> None:
        for i in range(first, len(hashes)):
            self._hash_of[run.blocks[i]] = hashes[i]
            self._cached.setdefault(hashes[i], OrderedDict())[run.blocks[i]] = None
        run.hashes = hashes
        for at in range(first, len(hashes), self._chunk):
            self._announce(run, at, min(at + self._chunk, len(hashes)))
        if self._host_blocks:
            self._spill(run, first)

    def _announce(self, run: Running, first: int, last: int, medium: str = "GPU") -> None:
        size = self.block_tokens
        event = {
            "type": "BlockStored",
            "block_hashes": run.hashes[first:last],
            "parent_block_hash": run.hashes[first - 1] if first else None,
            "token_ids": run.tokens[first * size : last * size],
            "block_size": size,
            "lora_id": None,
            "medium": medium,
            "lora_name": None,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        if medium == "GPU":
            event["session_id"] = run.id
        self.events.append(event)

    def _spill(self, run: Running, first: int) -> None:
        """Copies on the host, announced with children before parents, as vLLM may do; LRU, removals announced."""
        for i in reversed(range(first, len(run.hashes))):
            if run.hashes[i] in self._host:
                continue
            if len(self._host) >= self._host_blocks:
                gone, _ = self._host.popitem(last=False)
                self.events.append({"type": "BlockRemoved", "block_hashes": [gone], "medium": "CPU", "group_idx": 0})
            self._host[run.hashes[i]] = None
            self._announce(run, i, i + 1, "CPU")
