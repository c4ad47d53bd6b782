"""What lies on disk, as the agent reads it: the chunks' heads, and beside them maps of the texts that they hold.

The files themselves are the truth: of an engine that has just started, and of the other replicas that share the directory.
Blocks: calls belong in a thread.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple
from uuid import uuid4

from prefixpool_agent import saved_map
from prefixpool_agent.residency.kv_event import block_hash
from prefixpool_agent.saved_map import SavedMap
from prefixpool_agent.tiers.chunk_file import HEAD_BYTES, ChunkError, Head, decode
from prefixpool_agent.tiers.disk_store import SUFFIX
from prefixpool_agent.tiers.trail import GROUP_BYTES

MAPS: Final = "maps"
_MAP: Final = ".map"
_STORE: Final = "store.id"
_NAME: Final = re.compile(rb"[0-9a-f]{32}")
_NAME_BYTES: Final = 32
_FIRST_GROUP: Final = bytes(GROUP_BYTES)


class DiskBlock(NamedTuple):
    """A block on disk, and the one before it in its prompt; None: it begins one."""

    hash: int
    parent: int | None


class Seen(NamedTuple):
    """Since the last look."""

    maps: list[bytes]  # what agents knew of texts
    found: list[DiskBlock]  # parents first
    gone: list[int]

    def __bool__(self) -> bool:
        return bool(self.maps or self.found or self.gone)


class DiskFolder:
    """The chunks of one model. Of models with several KV groups the first is looked at, as residency does."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, int] = {}  # name -> block; of chunks without a known place, too
        self._maps: dict[str, int] = {}  # name -> time of its last change

    def look(self) -> Seen:
        """What came and went. Raises OSError if there is no such folder."""
        names = dict(self._chunks())
        gone = [self._known.pop(name) for name in list(self._known) if name not in names]
        found: list[tuple[int, DiskBlock]] = []
        for name, path in names.items():
            if name not in self._known and (head := _head(path)) is not None:
                self._known[name] = hash_ = _hash(head.key)
                if head.tokens:
                    found.append((head.tokens, DiskBlock(hash_, _hash(head.parent) if head.parent else None)))
        return Seen(list(self._new_maps()), [block for _, block in sorted(found)], gone)

    def store(self) -> str:
        """Which directory this is, for all who have it. The first who asks names it; a broken name, as a machine that lost
        power leaves, is replaced, and the last to do so is believed at the next look. Raises OSError.
        """
        path = self._maps_folder() / _STORE
        if not (named := _name(path)):
            mine = path.with_name(f"{_STORE}.{uuid4().hex}")
            mine.write_text(uuid4().hex)
            try:
                os.link(mine, path) if named is None else mine.replace(path)
            except FileExistsError:
                pass  # another was faster
            finally:
                mine.unlink(missing_ok=True)
            named = _name(path)
        return named or ""

    def save(self, replica: str, saved: SavedMap) -> None:
        """For the next agent, here or of another replica. Raises OSError."""
        path = self._maps_folder() / f"{replica}{_MAP}"
        saved_map.write(path, saved)
        self._maps[path.name] = path.stat().st_mtime_ns

    def _maps_folder(self) -> Path:
        maps = self._folder / MAPS
        maps.mkdir(mode=0o700, exist_ok=True)
        return maps

    def _chunks(self) -> Iterator[tuple[str, Path]]:
        for part in os.scandir(self._folder):
            if len(part.name) != 2 or not part.is_dir():
                continue
            for file in os.scandir(part.path):
                if file.name.endswith(_FIRST_GROUP.hex() + SUFFIX):
                    yield file.name, Path(file.path)

    def _new_maps(self) -> Iterator[bytes]:
        for path in sorted((self._folder / MAPS).glob(f"*{_MAP}")):
            try:
                changed = path.stat().st_mtime_ns
            except OSError:
                continue  # replaced just now
            if self._maps.get(path.name) != changed:
                self._maps[path.name] = changed
                if (saved := saved_map.read(path)) is not None:
                    yield saved.residency


def _hash(key: bytes) -> int:
    return block_hash(key[:-GROUP_BYTES])


def _name(path: Path) -> str | None:
    """None: it has none; "": what is there is none of ours. Raises OSError."""
    try:
        with path.open("rb", buffering=0) as file:
            found = file.read(_NAME_BYTES + 1)
    except FileNotFoundError:
        return None
    return found.decode() if _NAME.fullmatch(found) else ""


def _head(path: Path) -> Head | None:
    try:
        with path.open("rb", buffering=0) as file:
            return decode(file.read(HEAD_BYTES))
    except (OSError, ChunkError):
        return None
