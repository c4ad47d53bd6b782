"""Pieces of the maps beside the chunks on disk: what one agent told of texts, written once, merged later. Pure.

    <writer>.<first>-<last>.map       magic 8 | checksum 16 | facts as `residency.saved` packs them

A writer numbers its pieces; a merged one has the numbers of all that went into it. So whoever has read these need not read
it: what was told is read once. A writer is one life of one agent.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from typing import Final, NamedTuple

import mmh3

SUFFIX: Final = ".map"
TEMPORARY: Final = ".tmp"  # behind the name of a piece that is being written
_MAGIC: Final = b"PPMAP001"
_MAGICS: Final = re.compile(rb"PPMAP\d{3}")  # of all versions
_CHECKSUM_BYTES: Final = 16
_NAME: Final = re.compile(r"([0-9a-f]{16})\.(\d{1,15})-(\d{1,15})\.map")
_WRITER: Final = re.compile(r"([0-9a-f]{16})\.")

Rows = Iterable[tuple[int, Sequence[int]]]  # (block hash, [boundary, depth, boundary, depth, ...])


class Segment(NamedTuple):
    """A piece: whose, and its numbers."""

    writer: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.writer}.{self.first}-{self.last}{SUFFIX}"


def segment(name: str) -> Segment | None:
    """Of a file's name; None: it is none."""
    found = _NAME.fullmatch(name)
    return Segment(found[1], int(found[2]), int(found[3])) if found else None


def writer(name: str) -> str:
    """Whose file it is, of whatever kind; "": nobody's."""
    found = _WRITER.match(name)
    return found[1] if found else ""


def age(name: str) -> tuple[str, int]:
    """To sort files by, of each writer the older pieces first; one that was merged is as old as its last part."""
    one = segment(name.removesuffix(TEMPORARY))
    return writer(name), one.last if one is not None else 0


def seal(body: bytes) -> bytes:
    """What goes into the file."""
    return _MAGIC + mmh3.mmh3_x64_128_digest(body) + body


def opened(data: bytes) -> bytes | None:
    """What `seal` got; None: not that, or not whole."""
    at = len(_MAGIC) + _CHECKSUM_BYTES
    body = data[at:]
    return body if data[:at] == _MAGIC + mmh3.mmh3_x64_128_digest(body) else None


def later(data: bytes) -> bool:
    """Of a version that came after this one, which cannot tell whether it is whole."""
    return _MAGICS.match(data) is not None and data[: len(_MAGIC)] > _MAGIC


def merge(parts: Iterable[Rows], lying: Container[int]) -> list[tuple[int, list[int]]]:
    """Older parts first. Blocks that do not lie on disk are left out; of a boundary in several parts the last word holds."""
    where: dict[int, tuple[int, int]] = {}
    for rows in parts:
        for block, pairs in rows:
            if block in lying:
                where |= {key: (block, depth) for key, depth in zip(pairs[::2], pairs[1::2], strict=True)}
    out: dict[int, list[int]] = {}
    for key, (block, depth) in where.items():
        out.setdefault(block, []).extend((key, depth))
    return list(out.items())


class Numbers:
    """Of one writer's pieces: which were read."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []  # nearly always one

    def has(self, one: Segment) -> bool:
        """All of it."""
        return any(first <= one.first and one.last <= last for first, last in self._ranges)

    def add(self, one: Segment) -> None:
        """Read."""
        first, last, rest = one.first, one.last, []
        for a, b in self._ranges:
            if b + 1 < first or last + 1 < a:
                rest.append((a, b))
            else:
                first, last = min(first, a), max(last, b)
        self._ranges = [*rest, (first, last)]
