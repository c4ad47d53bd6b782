"""Keeps the residency picture true to the disk: after an engine's start, and to what other replicas write there."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from prefixpool import names
from prefixpool_agent.disk_folder import DiskFolder, Seen
from prefixpool_agent.follower import Follower
from prefixpool_agent.residency import Residency
from prefixpool_agent.saved_map import SavedMap

LOOK_S: Final = 2.0
SAVE_S: Final = 30.0  # between two saves of a map of SAVE_BYTES or more
SAVE_BYTES: Final = 1 << 20
WRITE_S: Final = 2.0
SHARE: Final = 0.05  # of the time, at most, goes into looking

log = logging.getLogger(__name__)


class DiskFollower:
    """The engine says in the run directory where its chunks are, once it has opened the tier."""

    def __init__(self, run_dir: Path, replica: str, follower: Follower, *, shared: bool) -> None:
        self._told = run_dir / names.RUN_DISK_FOLDER
        self._replica = replica
        self._follower = follower
        self._shared = shared
        self._folder: DiskFolder | None = None
        self._path = ""
        self._of: tuple[Residency | None, int] = (None, 0)  # whose picture, which life of it
        self._saved_s = float("-inf")
        self._writing: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            began_s = time.monotonic()
            try:
                await self._look()
            except OSError as error:
                log.debug("disk tier", extra={"error": str(error)})
            await asyncio.sleep(max(LOOK_S, (time.monotonic() - began_s) / SHARE))

    async def _look(self) -> None:
        residency = self._follower.residency
        if residency is None or not self._follower.following:
            return
        path = await asyncio.to_thread(self._told.read_text)
        of = (residency, residency.lives)
        if self._folder is None or path != self._path or of != self._of:
            self._folder, self._path, self._of = DiskFolder(Path(path)), path, of
        seen = await asyncio.to_thread(self._folder.look)
        for news in _portions(seen):
            if of != (self._follower.residency, residency.lives) or not self._follower.following:
                break  # another picture, for which all is looked at anew
            self._follower.disk(news.maps, news.found, news.gone)
            await asyncio.sleep(0)
        # Last: what was seen is seen once, and a directory that cannot be named must not lose it.
        if self._shared and (store := await asyncio.to_thread(self._folder.store)) != self._follower.store:
            self._follower.mounts(store)

    @property
    def follows(self) -> bool:
        """The engine has a disk tier, and it was found."""
        return self._folder is not None

    async def save(self, saved: SavedMap, *, at_once: bool = False) -> None:
        """Beside the chunks, now and then. Of a disk that hangs nobody waits long, and one thread at most.

        `at_once`: now, and nobody waits at all.
        """
        pause_s = 0.0 if at_once else between_saves_s(len(saved.residency))
        if self._folder is None or not self._written() or time.monotonic() - self._saved_s < pause_s:
            return
        self._saved_s = time.monotonic()
        self._writing = asyncio.create_task(self._write(self._folder, saved), name="map of the disk tier")
        await asyncio.wait({self._writing}, timeout=0.0 if at_once else WRITE_S)
        if not at_once and not self._written():
            log.warning("map of the disk tier is not written yet", extra={"after_s": WRITE_S})

    def _written(self) -> bool:
        return self._writing is None or self._writing.done()

    async def _write(self, folder: DiskFolder, saved: SavedMap) -> None:
        try:
            await asyncio.to_thread(folder.save, self._replica, saved)
        except OSError as error:
            log.warning("map of the disk tier could not be saved", extra={"error": str(error)})


def _portions(seen: Seen) -> Iterator[Seen]:
    """Map by map: a large one takes tenths of a second, and many replicas may share the disk."""
    yield from (Seen([one], [], []) for one in seen.maps)
    if chunks := Seen([], seen.found, seen.gone):
        yield chunks


def between_saves_s(map_bytes: int) -> float:
    """All who share the disk read each map whole. A small one costs little, and tells them sooner what was written."""
    return max(LOOK_S, min(SAVE_S, SAVE_S * map_bytes / SAVE_BYTES))
