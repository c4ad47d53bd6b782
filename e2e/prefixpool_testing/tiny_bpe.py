"""A byte-level BPE encoder for tests: what a real engine's tokenizer does, in thirty lines, from the same tokenizer.json."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec

_PIECE: Final = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[^\W\d_]+| ?\d+| ?[^\s\w]+|_+|\s+(?!\S)|\s+")


class TinyBpe:
    """Reads a `tokenizer.json` with merges; special tokens are matched first."""

    def __init__(self, path: Path) -> None:
        document: dict[str, Any] = msgspec.json.decode(path.read_bytes())
        self._vocabulary: dict[str, int] = document["model"]["vocab"]
        self._ranks = {tuple(pair): rank for rank, pair in enumerate(document["model"]["merges"])}
        self._special = {token["content"]: token["id"] for token in document["added_tokens"]}
        self._split = re.compile("(" + "|".join(map(re.escape, self._special)) + ")")
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        rest = [byte for byte in range(256) if byte not in printable]
        self._character = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(rest)}
        self._memo: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids."""
        out: list[int] = []
        for part in self._split.split(text):
            if part in self._special:
                out.append(self._special[part])
            else:
                for piece in _PIECE.findall(part):
                    out += self._memo.get(piece) or self._memo.setdefault(piece, list(self._merge(piece)))
        return out

    def _merge(self, piece: str) -> Iterator[int]:
        parts = [self._character[byte] for byte in piece.encode()]
        while len(parts) > 1:
            ranked = [(self._ranks.get(pair, len(self._ranks)), i) for i, pair in enumerate(pairwise(parts))]
            rank, i = min(ranked)
            if rank == len(self._ranks):
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return (self._vocabulary[part] for part in parts)
