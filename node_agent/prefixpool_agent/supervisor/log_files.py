"""Keeps log files of engine and agent from filling the disk (or, in a tmpfs, the memory)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

MAX_BYTES: Final = 64 << 20
KEEP_BYTES: Final = 1 << 20
_CHECK_S: Final = 60.0


async def keep_logs_small(paths: Iterable[Path]) -> None:
    """For ever."""
    paths = list(paths)
    while True:
        await asyncio.sleep(_CHECK_S)
        for path in paths:
            trim(path)


def trim(path: Path, *, max_bytes: int = MAX_BYTES, keep_bytes: int = KEEP_BYTES) -> None:
    """Cut a file that has grown too large down to its end. Writers append, so they go on behind it."""
    try:
        size = path.stat().st_size
        if size <= max_bytes:
            return
        with path.open("rb") as file:
            file.seek(size - keep_bytes)
            tail = file.read(keep_bytes).partition(b"\n")[2]
        os.truncate(path, 0)
        with path.open("ab") as file:
            file.write(tail)
    except OSError:
        return  # it was removed, or the disk is full: nothing that can be done here
