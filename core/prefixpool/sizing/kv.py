"""How the engine cuts KV memory into blocks (vLLM 0.32, `v1/core/kv_cache_utils.py`).

Layers are put into groups; all groups draw blocks from one pool, and a block holds `block_tokens` tokens of every layer of
one group. Models of one kind have one group. Mixed models get groups of equally many layers, as many as the rarest kind
has (Gemma 3: one group of 5 full layers, six of 5 with windows); the last group may be padded, which costs memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import msgspec

from prefixpool.sizing.parallel import Parallel, copies, rank_layers, stage_layers
from prefixpool.sizing.shape import KvLayers, LayerKind, ModelShape

DEFAULT_BLOCK_TOKENS: Final = 16
CPU_BLOCK_TOKENS: Final = 32  # what our worker asks for on CPUs, and the sim
NULL_BLOCKS: Final = 1  # block 0 stands for "nothing here" and never holds KV
_NEARLY_EQUAL: Final = 1.5  # below it, the rarer kind is padded instead of splitting the commoner one


class KvDtype(StrEnum):
    """How KV is stored. AUTO: as the model computes, two bytes."""

    AUTO = "auto"
    BF16 = "bf16"
    FP8 = "fp8"

    @property
    def bytes(self) -> int:
        return 1 if self is KvDtype.FP8 else 2


class KvGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share a table of blocks."""

    kind: LayerKind
    layers: int
    block_tokens: int
    window: int = 0

    def blocks_for(self, tokens: int, in_flight: int) -> int:
        """Blocks that one sequence holds. `in_flight`: tokens computed but not settled, kept beyond a window."""
        if self.kind is LayerKind.STATE:
            return 2 if in_flight else 1  # the one being written, and the last one that can be reused
        if self.kind is LayerKind.WINDOW:
            return -(-min(tokens, self.window - 1 + in_flight) // self.block_tokens) + 1
        if self.kind is LayerKind.CHUNK:
            tokens = min(tokens, self.window + in_flight)
        return -(-tokens // self.block_tokens)


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """On one device (of the fullest pipeline stage)."""

    groups: tuple[KvGroup, ...]
    block_tokens: int
    page_bytes: int  # one layer of one block
    block_bytes: int  # one block of a group

    def blocks(self, memory: int) -> int:
        """Blocks in so many bytes, the null block included, as the engine reports them."""
        return max(0, memory) // self.block_bytes

    def blocks_for(self, tokens: int, in_flight: int = 0) -> int:
        """Blocks that one sequence of so many tokens holds, over all groups."""
        return sum(group.blocks_for(tokens, in_flight) for group in self.groups)

    def tokens(self, blocks: int, length: int, in_flight: int = 0) -> int:
        """Tokens in sequences of `length` that so many blocks hold: what vLLM logs as `KV cache size`."""
        return int(blocks / self.blocks_for(length, in_flight) * length)


def layout(
    shape: ModelShape,
    dtype: KvDtype = KvDtype.AUTO,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    parallel: Parallel | None = None,
) -> KvLayout:
    """How this model's KV is laid out on one device."""
    split = parallel or Parallel()
    kinds = [rank_layers(layers, split) for layers in shape.kv]
    block = _aligned_block(kinds, dtype, block_tokens)
    page = max(_page_bytes(layers, dtype, block) for layers in kinds)
    size = _group_size([layers.count for layers in kinds])
    groups = tuple(group for layers in kinds for group in _split(layers, size, block, page, dtype))
    widest = max(group.layers for group in groups)
    return KvLayout(groups=groups, block_tokens=block, page_bytes=page, block_bytes=page * stage_layers(widest, split))


def bytes_per_token(shape: ModelShape, dtype: KvDtype, parallel: Parallel | None = None) -> int:
    """What one more token of a long sequence takes on all devices of a replica, copies included.

    Layers with a window or a state take no more once the sequence is long, and do not count, unless there are no others.
    """
    split = parallel or Parallel()
    growing = [layers for layers in shape.kv if layers.grows] or [
        layers for layers in shape.kv if layers.kind is not LayerKind.STATE
    ]
    return sum(layers.count * layers.heads * layers.values * dtype.bytes * copies(layers, split) for layers in growing)


def bytes_per_sequence(shape: ModelShape, dtype: KvDtype, tokens: int) -> int:
    """KV that decoding one token of a sequence of this length reads, one copy."""
    return sum(_sequence_bytes(layers, dtype, tokens) for layers in shape.kv)


def _sequence_bytes(layers: KvLayers, dtype: KvDtype, tokens: int) -> int:
    if layers.kind is LayerKind.STATE:
        return layers.count * layers.state_bytes
    kept = min(tokens, layers.window) if layers.window else tokens
    return layers.count * layers.heads * layers.values * dtype.bytes * kept


def _page_bytes(layers: KvLayers, dtype: KvDtype, block_tokens: int) -> int:
    if layers.kind is LayerKind.STATE:
        return layers.state_bytes
    return layers.heads * layers.values * dtype.bytes * block_tokens


def _aligned_block(kinds: Sequence[KvLayers], dtype: KvDtype, block_tokens: int) -> int:
    """Where states are mixed in, blocks grow until one of attention is as large as a state."""
    state = max((_page_bytes(one, dtype, 1) for one in kinds if one.kind is LayerKind.STATE), default=0)
    token = max((_page_bytes(one, dtype, 1) for one in kinds if one.kind is not LayerKind.STATE), default=0)
    if not state or not token:
        return block_tokens
    return max(block_tokens, block_tokens * -(-state // (block_tokens * token)))


def _group_size(counts: Sequence[int]) -> int:
    least, most = min(counts), max(counts)
    return most if most < least * _NEARLY_EQUAL else least


def _split(layers: KvLayers, size: int, block: int, page: int, dtype: KvDtype) -> list[KvGroup]:
    """Groups of one kind. Kinds with smaller pages take more tokens in each block, so that all pages are one size."""
    own = _page_bytes(layers, dtype, block)
    tokens = block if layers.kind is LayerKind.STATE or page % own else block * (page // own)
    number = -(-layers.count // size)
    return [
        KvGroup(
            kind=layers.kind,
            layers=len(range(index, layers.count, number)),
            block_tokens=tokens,
            window=layers.window,
        )
        for index in range(number)
    ]
