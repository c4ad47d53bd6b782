"""Reading and writing a chunk's file in one go, and finding such files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from prefixpool_agent.tiers.chunk_file import ChunkError


def read_whole(path: Path, buffer: bytearray) -> memoryview:
    """A file, inside the buffer. Raises OSError, or ChunkError for one that is longer than any chunk."""
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size > len(view):
            raise ChunkError(f"more than {len(view)} bytes")
        read = 0
        while more := file.readinto(view[read:]):
            read += more
    return view[:read]


def write_all(descriptor: int, head: bytes, payload: bytes | bytearray | memoryview) -> None:
    """One behind the other. Raises OSError."""
    written = os.writev(descriptor, [head, payload])
    whole = memoryview(head + bytes(payload)) if written < len(head) + len(payload) else memoryview(b"")
    while written < len(whole):
        written += os.write(descriptor, whole[written:])


def unlink(path: Path) -> bool:
    """False: it was gone, or may not be removed."""
    try:
        path.unlink()
    except OSError:
        return False
    return True


def files_below(folder: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """By the ends of their names. Raises OSError: what cannot be listed for a moment must not count as gone."""
    for parent, _, names in os.walk(folder, onerror=_went_or_raise):
        for name in names:
            if name.endswith(suffixes):
                yield Path(parent, name)


def _went_or_raise(error: OSError) -> None:
    """Folders that went meanwhile, or are another user's, hold nothing that is ours."""
    if not isinstance(error, FileNotFoundError | PermissionError):
        raise error
