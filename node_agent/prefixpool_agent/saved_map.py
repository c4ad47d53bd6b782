"""What an agent leaves for its successor: a file in the run directory, written whole or not at all.

Which boundaries belong to which blocks are facts about texts: they stay true whatever happens to engine and agent, and are
used again as soon as an engine announces the blocks. No text and no token ids are in the file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

from prefixpool.wire import Costs

VERSION: Final = 1


class SavedMap(msgspec.Struct, frozen=True, kw_only=True):
    """`residency`: what `Residency.save()` gave; it checks block size and template itself."""

    version: int
    costs: Costs
    residency: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SavedMap)


def write(path: Path, saved: SavedMap) -> None:
    """Replace the file atomically. Blocks: call it in a thread. Raises OSError.

    No fsync: the directory is a tmpfs, and a machine that loses it loses the engine, too.
    """
    fresh = path.with_name(path.name + ".new")
    descriptor = os.open(fresh, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(_encoder.encode(saved))
    fresh.replace(path)


def read(path: Path) -> SavedMap | None:
    """None: there is none, or it is of another version, or broken."""
    try:
        saved = _decoder.decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError):
        return None
    return saved if saved.version == VERSION else None
