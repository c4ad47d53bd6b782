"""What lies on disk, as the agent reads it from the chunks' names and heads.

The files themselves are the truth: of an engine that has just started, and of the other replicas that share the directory.
Blocks: calls belong in a thread.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from prefixpool_agent.residency.kv_event import block_hash
from prefixpool_agent.tiers.chunk_file import HEAD_BYTES, ChunkError, Head, decode
from prefixpool_agent.tiers.disk_store import SUFFIX
from prefixpool_agent.tiers.trail import GROUP_BYTES

_NAME: Final = re.compile(rf"(?:[0-9a-f]{{2}})+{bytes(GROUP_BYTES).hex()}{re.escape(SUFFIX)}")  # of the first group


class DiskBlock(NamedTuple):
    """A block on disk, and the one before it in its prompt; None: it begins one."""

    hash: int
    parent: int | None


class Seen(NamedTuple):
    """Since the last look."""

    found: list[DiskBlock]  # parents first
    gone: list[int]

    def __bool__(self) -> bool:
        return bool(self.found or self.gone)

    def parts(self, most: int) -> Iterator[Seen]:
        """The same in portions of so many blocks at most; none if nothing is new."""
        for at in range(0, len(self.gone), most):
            yield Seen([], self.gone[at : at + most])
        for at in range(0, len(self.found), most):
            yield Seen(self.found[at : at + most], [])


class DiskFolder:
    """The chunks of one model. Of models with several KV groups the first is looked at, as residency does."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, int] = {}  # name -> block; of chunks without a known place, too
        self._unread: set[int] = set()  # blocks whose heads could not be read: perhaps only for a moment
        self.steps = 0  # answers of the disk: a look at many chunks takes long, one that hangs gets no further

    def look(self) -> Seen:
        """What came and went. Raises OSError if there is no such folder."""
        names = dict(self._chunks())
        gone = [self._known.pop(name) for name in list(self._known) if name not in names]
        found: dict[int, list[DiskBlock]] = {}  # by depth: to sort so many at once would keep all other threads waiting
        self._unread = set()
        for name, part in names.items():
            if name in self._known:
                continue
            if (head := self._head(part, name)) is None:
                self._unread.add(_named(name))
                continue
            self._known[name] = hash_ = _hash(head.key)
            if head.tokens:
                found.setdefault(head.tokens, []).append(DiskBlock(hash_, _hash(head.parent) if head.parent else None))
        return Seen([block for tokens in sorted(found) for block in found[tokens]], gone)

    @property
    def known(self) -> set[int]:
        """The blocks that lay there at the last look, those included whose heads could not be read."""
        return set(self._known.values()) | self._unread

    def lying(self) -> set[int]:
        """The blocks that lie there now, by the names of their files: quicker than a look. Raises OSError."""
        return {_named(name) for name, _ in self._chunks()}

    def _chunks(self) -> Iterator[tuple[str, str]]:
        """Names, and the folders that they are in: paths of a million files would take half a gigabyte."""
        for part in os.scandir(self._folder):
            self.steps += 1
            if len(part.name) != 2 or not part.is_dir():
                continue
            for file in os.scandir(part.path):
                if _NAME.fullmatch(file.name):
                    yield file.name, part.path

    def _head(self, part: str, name: str) -> Head | None:
        self.steps += 1
        try:
            with open(os.path.join(part, name), "rb", buffering=0) as file:
                return decode(file.read(HEAD_BYTES))
        except (OSError, ChunkError):
            return None


def _named(name: str) -> int:
    """The block of a chunk's file."""
    return _hash(bytes.fromhex(name.removesuffix(SUFFIX)))


def _hash(key: bytes) -> int:
    return block_hash(key[:-GROUP_BYTES])
