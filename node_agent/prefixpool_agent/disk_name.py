"""Which directory of chunks this is, for all who share it: a name that it keeps when it is moved, and that a copy has not.

    maps/store.id       name, 32 hex digits | space | inode of `maps` | "-" | inode of this file

Inodes are the same for all who see a directory, by whatever path, machine or mount; a copy's are others. What is copied
below the file system, block by block, keeps its name: who does that for two pools at once deletes the file in one of them.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Final, NamedTuple
from uuid import uuid4

FILE: Final = "store.id"
_TEXT: Final = re.compile(rb"([0-9a-f]{32}) (\d+-\d+)")
_MOST_BYTES: Final = 128

log = logging.getLogger(__name__)


class _Found(NamedTuple):
    name: str  # "": what is there is none of ours
    here: bool  # it was given to this directory


class DiskName:
    """Of one directory, as one process asks for it."""

    def __init__(self, maps: Path) -> None:
        """`maps`: the folder in which the name is."""
        self._maps = maps
        self._path = maps / FILE
        self._renames = True  # once: where inodes differ from one look to the next, all would rename for ever

    def ask(self) -> str:
        """The first who asks names it. A broken name, as a machine that lost power leaves, and that of a copied directory
        are replaced, and the last to do so is believed at the next look. Raises OSError.
        """
        found = self._found()
        if found is not None and found.name and (found.here or not self._renames):
            return found.name
        if found is not None and found.name:
            self._renames = False
            told = "this directory of the disk tier is a copy, or was restored: it gets a name of its own"
            log.warning(told, extra={"directory": str(self._maps.parent), "was": found.name})
        self._give(replace=found is not None)
        named = self._found()
        return named.name if named is not None else ""

    def _give(self, *, replace: bool) -> None:
        self._maps.mkdir(mode=0o700, exist_ok=True)
        mine = self._path.with_name(f"{FILE}.{uuid4().hex}")
        try:
            with mine.open("xb", buffering=0) as file:
                file.write(f"{uuid4().hex} {self._inodes(file.fileno())}".encode())
            if replace:
                mine.replace(self._path)
            else:
                self._appear(mine)
        finally:
            mine.unlink(missing_ok=True)

    def _appear(self, mine: Path) -> None:
        try:
            os.link(mine, self._path)
        except FileExistsError:
            pass  # another was faster
        except OSError:  # a file system without hard links (SMB, object stores), or worse, which shows now
            mine.replace(self._path)

    def _found(self) -> _Found | None:
        """None: it has none. Raises OSError."""
        try:
            with self._path.open("rb", buffering=0) as file:
                text, inodes = file.read(_MOST_BYTES), self._inodes(file.fileno())
        except FileNotFoundError:
            return None
        match = _TEXT.fullmatch(text)
        return _Found(match[1].decode(), match[2].decode() == inodes) if match else _Found("", False)

    def _inodes(self, file: int) -> str:
        return f"{os.stat(self._maps).st_ino}-{os.fstat(file).st_ino}"
