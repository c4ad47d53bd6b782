"""The engine's KV events (vLLM 0.32: maps), read once at the edge into what residency needs. Pure.

Kept: blocks of the full-attention group. A hybrid model has one event stream per KV group and a hit needs every group; the
full-attention group is the one whose blocks reach back to the first token (research: vllm.md 1.1).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from prefixpool.wire import Tier

_TIERS: Final = {None: Tier.DEVICE, "GPU": Tier.DEVICE, "CPU": Tier.HOST, "STORAGE": Tier.DISK}
_WHOLE_PATH: Final = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
_LOW_64: Final = (1 << 64) - 1


class Stored(NamedTuple):
    """Blocks that follow one another; `tokens` empty: a placeholder that names hashes only."""

    hashes: list[int]
    parent: int | None
    tokens: array[int]
    tier: Tier
    session: str
    group: int | None


class Removed(NamedTuple):
    """Blocks that left a tier."""

    hashes: list[int]
    tier: Tier
    group: int | None


class Cleared(NamedTuple):
    """All blocks of the device tier are gone; lower tiers are not meant."""


KvEvent = Stored | Removed | Cleared


def parse_event(event: Mapping[str, Any]) -> KvEvent | str:
    """The event, or one word that says why it is ignored (a counter's name)."""
    kind = event.get("type")
    if kind == "AllBlocksCleared":
        return Cleared()
    if kind not in ("BlockStored", "BlockRemoved"):
        return "unknown_event"
    medium = event.get("medium")
    if medium not in _TIERS:
        return "unknown_medium"
    if kind == "BlockStored" and event.get("kv_cache_spec_kind") not in _WHOLE_PATH:
        return "other_kv_group"
    group = event.get("group_idx")
    try:
        hashes = [block_hash(raw) for raw in event["block_hashes"]]
        if kind == "BlockRemoved":
            return Removed(hashes, _TIERS[medium], group)
        return Stored(hashes, _parent(event), _tokens(event), _TIERS[medium], event.get("session_id") or "", group)
    except (KeyError, TypeError, ValueError, OverflowError):
        return "malformed_event"


def block_hash(raw: int | bytes) -> int:
    """As vLLM publishes integers by default: the low 64 bits of the digest, read big-endian."""
    return int.from_bytes(raw[-8:], "big") if isinstance(raw, bytes) else raw & _LOW_64


def _parent(event: Mapping[str, Any]) -> int | None:
    raw = event.get("parent_block_hash")
    return None if raw is None else block_hash(raw)


def _tokens(event: Mapping[str, Any]) -> array[int]:
    tokens: Sequence[int] = event["token_ids"] if event.get("block_size") else ()
    return array("I", tokens)
