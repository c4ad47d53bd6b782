"""Block hashes exactly as vLLM 0.32 computes them with its default `sha256` and seed (research: vllm.md 2). Pure."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Final

NONE_HASH: Final = sha256(pickle.dumps("vllm-none-hash", protocol=5)).digest()
_EXTERNAL_MASK: Final = (1 << 64) - 1

ExtraKeys = tuple[tuple[str, ...], ...]


def extra_keys(*, adapter: str, salt: str) -> ExtraKeys:
    """Keys of the first block; later blocks have only the adapter's."""
    lora = (("lora", adapter, adapter),) if adapter else ()
    return (*lora, ("cache_salt", salt)) if salt else lora


def next_hash(parent: bytes, tokens: Sequence[int], keys: ExtraKeys) -> bytes:
    """Hash of one full block. `parent`: the block before it, `NONE_HASH` for the first."""
    item: tuple[Any, ...] = (parent, tuple(tokens), keys or None)
    return sha256(pickle.dumps(item, protocol=5)).digest()


def external(digest: bytes) -> int:
    """The hash as KV events carry it: the low 64 bits."""
    return int.from_bytes(digest[-8:], "big") & _EXTERNAL_MASK


class BlockHashes:
    """Hashes of the full blocks of one growing token sequence."""

    def __init__(self, block_tokens: int, *, adapter: str = "", salt: str = "") -> None:
        self.block_tokens = block_tokens
        self._first = extra_keys(adapter=adapter, salt=salt)
        self._later = extra_keys(adapter=adapter, salt="")
        self.digests: list[bytes] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Hash the blocks that `tokens`, the whole sequence so far, has filled."""
        size = self.block_tokens
        for start in range(len(self.digests) * size, len(tokens) - size + 1, size):
            parent = self.digests[-1] if start else NONE_HASH
            self.digests.append(next_hash(parent, tokens[start : start + size], self._later if start else self._first))

    def event_keys(self, index: int) -> list[str] | None:
        """Extra keys of a block as events carry them: untagged, an adapter without its path."""
        keys = self._later if index else self._first
        return [key[1] for key in keys] or None
