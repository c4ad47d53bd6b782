"""Boundaries of a canonical request: marks and geometric chunks, with the hash of the prefix before each."""

from __future__ import annotations

from array import array
from typing import Final, NamedTuple

from prefixpool.chain.canonical import Canonical

FIRST_CHUNK_BYTES: Final = 64
CHUNKS_PER_STAGE: Final = 64  # chunks of one size before the size doubles (bench/stage_length.py)
COLD_MIN_BYTES: Final = 2048  # a cold key lies at least this deep (design: 5)

CHUNK: Final = -1  # PrefixChain.marks: not a mark
CONTENT_END: Final = -2  # mark at the end of a segment's content


class PrefixChain(NamedTuple):
    """Boundaries in ascending order of offset; three parallel arrays."""

    hashes: array[int]  # 'Q': 64 bits of MurmurHash3 x64 128 over seed and prefix
    offsets: array[int]  # 'I': bytes of canonical text before the boundary (the seed not counted)
    marks: array[int]  # 'i': CHUNK, CONTENT_END, or i >= 0: behind the role marker of segment i (len(segments): generation)
    cold: int  # index of the boundary whose hash places a request that is cold everywhere; -1 for an empty chain
    total_bytes: int


def prefix_chain(request: Canonical) -> PrefixChain:
    """Cost grows with bytes for hashing and with log(bytes) + 2 * messages for boundaries."""
    raise NotImplementedError
