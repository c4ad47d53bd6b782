"""Bounds of everything that grows with traffic. What is dropped for them is counted, see `Residency.counts`."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults suit an engine of some million tokens, and cost about 400 MB when all of them are exhausted.

    Measured on CPython 3.11: 350 bytes a block of 16 tokens, 136 bytes a boundary.
    """

    blocks: int = 500_000  # blocks known, resident or leading to resident ones; those farther away yield to nearer ones
    boundaries: int = 1_000_000  # boundaries that hang on known blocks
    remembered: int = 200_000  # boundaries of blocks that are gone, or were saved and are not announced yet
    sessions: int = 4096  # requests between arrival and end; as many ended ones are remembered by id
    late_sessions: int = 64  # ended requests that still wait for their events
    content_bytes: int = 64 << 20  # texts of the requests above
