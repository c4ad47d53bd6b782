"""What keeps a fleet's knowledge alive: the membership, one stream per agent, probes, and the clock. All I/O of `Fleet`."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Final, NamedTuple

import aiohttp

from prefixpool_router.agent_stream import AgentStream
from prefixpool_router.fleet import Fleet
from prefixpool_router.membership import MembershipSource
from prefixpool_router.probe import Prober
from prefixpool_router.replica import Replica

TICK_S: Final = 0.25
_SWEEP_PAUSE_S: Final = 0.002  # between two steps of some ms at most, so that requests come in between


class _Running(NamedTuple):
    replica: Replica
    agent: str
    task: asyncio.Task[None]


class FleetTasks:
    """Owner of every task around one fleet. `key`: the pool's engine key, read anew for each connection."""

    def __init__(
        self,
        fleet: Fleet,
        source: MembershipSource,
        http: aiohttp.ClientSession,
        *,
        router: str,
        key: Callable[[], str],
        probe_interval_s: float,
    ) -> None:
        self._fleet = fleet
        self._source = source
        self._http = http
        self._router = router
        self._key = key
        self._prober = Prober(fleet, http, key, probe_interval_s)
        self._feed = asyncio.Lock()
        self._streams: dict[str, _Running] = {}

    async def run(self) -> None:
        """Until cancelled. An error in one of the loops is a defect and ends all of them."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow_members(), name="members")
                group.create_task(self._tick(), name="tick")
                group.create_task(self._sweep(), name="sweep")
                group.create_task(self._prober.run(), name="probe")
        finally:
            await _cancelled([running.task for running in self._streams.values()])

    async def _follow_members(self) -> None:
        async with contextlib.aclosing(self._source.updates()) as sets:
            async for members in sets:
                self._fleet.apply(members)
                await self._follow_agents()

    async def _follow_agents(self) -> None:
        wanted = {name: replica for name, replica in self._fleet.replicas.items() if replica.member.agent}
        await self._stop(
            [
                name
                for name, running in self._streams.items()
                if wanted.get(name) is not running.replica or running.replica.member.agent != running.agent
            ]
        )
        for name, replica in wanted.items():
            if name not in self._streams:
                self._start(replica, replica.member.agent or "")

    def _start(self, replica: Replica, agent: str) -> None:
        stream = AgentStream(
            self._http, agent, replica, router=self._router, key=self._key, feed=self._feed, draw=random.random
        )
        task = asyncio.create_task(stream.run(), name=f"agent stream {replica.name}")
        self._streams[replica.name] = _Running(replica, agent, task)

    async def _stop(self, names: list[str]) -> None:
        stopped = [self._streams.pop(name) for name in names]
        await _cancelled([stream.task for stream in stopped])
        for stream in stopped:
            stream.replica.lost("its address changed")

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            self._fleet.tick(max(0.0, loop.time() - due))
            due = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)

    async def _sweep(self) -> None:
        while True:
            more = self._fleet.knowledge.index.sweep()
            await asyncio.sleep(_SWEEP_PAUSE_S if more else TICK_S)


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
