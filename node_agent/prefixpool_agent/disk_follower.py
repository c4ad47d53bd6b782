"""Keeps the residency picture true to the disk: after an engine's start, and to what other replicas write there.

The disk may hang, for ever: it is asked from one thread at a time, and what is late is told, not waited for elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from prefixpool import names
from prefixpool.wire import DiskCause, DiskProblem
from prefixpool_agent.disk_folder import DiskFolder
from prefixpool_agent.disk_health import problem_of
from prefixpool_agent.disk_maps import FOLDER, DiskMaps
from prefixpool_agent.disk_name import DiskName
from prefixpool_agent.disk_thread import asked
from prefixpool_agent.follower import Follower
from prefixpool_agent.residency import Residency

LOOK_S: Final = 2.0
SHARE: Final = 0.05  # of the time, at most, goes into looking
LATE_S: Final = 10.0  # without an answer: the disk hangs
PORTION: Final = 2048  # blocks told at once: a large directory takes seconds, and all else waits meanwhile
CLOSE_S: Final = 2.0  # for the last words of an agent that ends

T = TypeVar("T")

log = logging.getLogger(__name__)


class _Place(NamedTuple):
    """A directory of chunks, as followed for one picture through all its lives."""

    path: str
    residency: Residency
    maps: DiskMaps
    name: DiskName


class DiskFollower:
    """The engine says in the run directory where its chunks are, once it has opened the tier."""

    def __init__(self, run_dir: Path, follower: Follower, *, shared: bool, late_s: float = LATE_S) -> None:
        self._told = run_dir / names.RUN_DISK_FOLDER
        self._follower = follower
        self._shared = shared
        self._late_s = late_s
        self._place: _Place | None = None
        self._folder: DiskFolder | None = None
        self._life = 0  # of the picture that the folder was looked at for
        self._now = asyncio.Event()
        self._errand: asyncio.Future[Any] | None = None
        self.problem: DiskProblem | None = None  # why nothing new is known of the disk, or told there

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            began_s = time.monotonic()
            try:
                await self._turn()
            except OSError as error:
                self._tell(problem_of(error))
            else:
                self._tell(None)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(LOOK_S, (time.monotonic() - began_s) / SHARE)):
                    await self._now.wait()
            self._now.clear()

    def soon(self) -> None:
        """An engine died: what its prompts said is what the next one, or another replica, finds on its disk."""
        self._now.set()

    async def close(self) -> None:
        """Behind `run`: what is known and not written yet. A disk that hangs is not waited for."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                if self._errand is not None:
                    await asyncio.wait({self._errand})
                if self._place is not None:
                    await self._leave(self._place)

    async def _turn(self) -> None:
        residency = self._follower.residency
        if residency is None:
            return
        if not self._follower.following:
            if self._place is not None and self._place.residency is residency:
                await self._leave(self._place)
            return
        try:
            path = await asyncio.to_thread(self._told.read_text)
        except FileNotFoundError:
            return  # no disk tier, or it is not open yet
        if not path:
            return  # the engine is just writing it
        place = self._at(path, residency)
        folder = await self._look(place)
        await self._texts(place, folder)
        # Last: what was seen is seen once, and a directory that cannot be named must not lose it.
        if self._shared and (store := await self._ask(place.name.ask)) != self._follower.store:
            self._follower.mounts(store)

    def _at(self, path: str, residency: Residency) -> _Place:
        if self._place is None or (path, residency) != self._place[:2]:
            folder = Path(path)
            maps = DiskMaps(folder, residency.kind, shared=self._shared)
            self._place, self._folder = _Place(path, residency, maps, DiskName(folder / FOLDER)), None
        return self._place

    async def _look(self, place: _Place) -> DiskFolder:
        """Each life of a picture hears of all that lies there."""
        life = place.residency.lives
        if self._folder is None or life != self._life:
            self._folder, self._life = DiskFolder(Path(place.path)), life
        folder = self._folder
        seen = await self._ask(folder.look, lambda: folder.steps)
        for part in seen.parts(PORTION):
            if not self._current(place, life):
                self._folder = None  # for another picture all is looked at anew
                break
            self._follower.disk([], part.found, part.gone)
            await asyncio.sleep(0)
        return folder

    async def _texts(self, place: _Place, folder: DiskFolder) -> None:
        """Facts about texts are true in any life."""
        rows = place.residency.take_news()
        news = await self._ask(lambda: place.maps.read(rows))
        place.residency.counts["map_damaged"] += news.damaged
        place.residency.counts["map_later"] += news.later
        if news.later:
            told = {"files": news.later, "folder": place.path}
            log.warning("maps beside the chunks are of a later version: not read, and left alone", extra=told)
        for one in news.maps:
            if self._follower.residency is not place.residency:
                return
            self._follower.disk([one], [], [])
            await asyncio.sleep(0)
        await self._ask(lambda: place.maps.write([], folder.known))

    async def _leave(self, place: _Place) -> None:
        """What a dead engine's prompts said, of what lies there now: of its last chunks it told nobody."""
        rows = place.residency.take_news()
        if rows or place.maps.waiting:
            folder = DiskFolder(Path(place.path))
            await self._ask(lambda: place.maps.write(rows, folder.lying()), lambda: folder.steps)

    def _current(self, place: _Place, life: int) -> bool:
        return self._follower.following and (self._follower.residency, place.residency.lives) == (place.residency, life)

    async def _ask(self, call: Callable[[], T], steps: Callable[[], int] = int) -> T:
        """However long it takes; told if it gets no further. `steps`: how far it is. Raises OSError."""
        answer, before = asked(call), steps()
        self._errand = answer
        while not answer.done():
            await asyncio.wait({answer}, timeout=self._late_s)
            if not answer.done() and steps() == before:
                self._tell(DiskProblem(cause=DiskCause.HANGS, words=f"it has not answered for more than {self._late_s:g} s"))
            before = steps()
        return answer.result()

    def _tell(self, problem: DiskProblem | None) -> None:
        if problem is not None and problem != self.problem:
            log.warning("disk tier", extra={"cause": problem.cause.value, "problem": problem.words})
        elif self.problem is not None and problem is None:
            log.info("disk tier is well again")
        self.problem = problem
