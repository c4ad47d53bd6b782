"""Keeps one router of a running pool alive. One that dies or hangs is started again on its port, because clients know it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from typing import Final

from prefixpool.silence import Silence
from prefixpool_cli.errors import PoolError
from prefixpool_cli.local_pool import LocalPool
from prefixpool_cli.pool_watch import Stage

WATCH_S: Final = 1.0
HUNG_S: Final = 20.0  # no answer for so long: it serves nobody
LONGEST_PAUSE_S: Final = 30.0  # between two starts
MOST_FAILURES: Final = 5  # starts in a row that end before the router is ready


class RouterKeeper:
    """`say` is told in words what happens."""

    def __init__(self, pool: LocalPool, number: int, say: Callable[[str], None]) -> None:
        self._pool = pool
        self._number = number
        self._router = pool.routers[number]
        self._say = say
        self._said = ""

    async def run(self) -> PoolError:
        """Until the router is given up, because it has died again and again: why it did the last time."""
        while True:
            self._say(f"{self._router.name} {await self._until_lost()}; starting it again")
            error = await self._started_again()
            if error is not None:
                self._say(f"{error}; {self._router.name} is given up")
                return error
            self._say(f"{self._router.name} is ready again")

    async def _until_lost(self) -> str:
        """What became of it."""
        loop = asyncio.get_running_loop()
        silence = Silence(loop.time(), allowed_s=HUNG_S)
        while True:
            await asyncio.sleep(WATCH_S)
            if self._router.ended is not None:
                return f"ended with code {self._router.ended}"
            if await self._pool.router_answers(self._number):
                silence.answered(loop.time())
            elif silence.missed(loop.time()) and self._router.ended is None:
                return f"has not answered for {HUNG_S:.0f} s"

    async def _started_again(self) -> PoolError | None:
        """None once it is ready, however long that takes: it may have to wait for an engine. Else why the last try ended."""
        failures, self._said = 0, ""
        while True:
            await self._pool.end_router(self._number)
            await asyncio.sleep(min(LONGEST_PAUSE_S, WATCH_S * (2**failures - 1)))
            try:
                await self._pool.start_router(self._number, progress=self._progress, timeout_s=inf)
            except PoolError as error:
                failures += 1
                if failures == MOST_FAILURES:
                    return error
                self._say(f"{error}; trying again")
            else:
                return None

    def _progress(self, stage: Stage) -> None:
        """What it waits for, each once."""
        if not stage.ready and stage.fraction and stage.words != self._said:
            self._said = stage.words
            self._say(f"{stage.part}: {stage.words}")
