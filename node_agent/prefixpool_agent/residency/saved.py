"""Facts about texts as bytes, for an agent that comes back: which boundaries belong to which block. Pure.

Neither text nor token ids, so the file is no more secret than what routers are told.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

VERSION: Final = 1


class Kind(NamedTuple):
    """Whose facts they are: another block size or chat template makes other blocks and boundaries of the same text."""

    block_tokens: int
    template: str  # digest


class _Saved(msgspec.Struct, array_like=True, frozen=True):
    """Columns: rows of `blocks` own `sizes[i]` entries of `hashes` and `depths`. Native byte order: read where written."""

    version: int
    block_tokens: int
    template: str
    blocks: bytes
    sizes: bytes
    hashes: bytes
    depths: bytes


class _Version(msgspec.Struct, array_like=True, frozen=True):
    """How every version begins."""

    version: int


_decoder: Final = msgspec.msgpack.Decoder(_Saved)
_version: Final = msgspec.msgpack.Decoder(_Version)


def dump(kind: Kind, facts: Iterable[tuple[int, Sequence[int]]]) -> bytes:
    """`facts`: (block hash, [boundary, depth, boundary, depth, ...])."""
    blocks, sizes, hashes, depths = array("Q"), array("I"), array("Q"), array("I")
    for block_hash, pairs in facts:
        blocks.append(block_hash)
        sizes.append(len(pairs) // 2)
        hashes.extend(pairs[::2])
        depths.extend(pairs[1::2])
    columns = [column.tobytes() for column in (blocks, sizes, hashes, depths)]
    return msgspec.msgpack.encode(_Saved(VERSION, *kind, *columns))


def load(data: bytes, kind: Kind) -> list[tuple[int, list[int]]] | None:
    """None if it is broken, of another version, or about another engine."""
    told = parse(data, only=kind)
    return told[1] if told is not None else None


def parse(data: bytes, *, only: Kind | None = None) -> tuple[Kind, list[tuple[int, list[int]]]] | None:
    """None if it is broken, of another version, or of another kind than the only one asked for."""
    try:
        saved = _decoder.decode(data)
        kind = Kind(saved.block_tokens, saved.template)
        if saved.version != VERSION or (only is not None and kind != only):
            return None
        return kind, _rows(saved)
    except (msgspec.DecodeError, ValueError):  # cut short while it was written
        return None


def later(data: bytes) -> bool:
    """Of a version that came after this one."""
    try:
        return _version.decode(data).version > VERSION
    except (msgspec.DecodeError, ValueError):
        return False


def _rows(saved: _Saved) -> list[tuple[int, list[int]]]:
    blocks, sizes, hashes, depths = array("Q"), array("I"), array("Q"), array("I")
    blocks.frombytes(saved.blocks)
    sizes.frombytes(saved.sizes)
    hashes.frombytes(saved.hashes)
    depths.frombytes(saved.depths)
    if len(blocks) != len(sizes) or not len(hashes) == len(depths) == sum(sizes):
        raise ValueError("columns of different lengths")
    rows: list[tuple[int, list[int]]] = []
    at = 0
    for block_hash, size in zip(blocks, sizes, strict=True):
        pairs = [x for pair in zip(hashes[at : at + size], depths[at : at + size], strict=True) for x in pair]
        rows.append((block_hash, pairs))
        at += size
    return rows
