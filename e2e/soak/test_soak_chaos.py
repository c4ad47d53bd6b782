"""Minutes of deaths at random moments: no client sees more of them than a stream that ends with an error event."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random

import aiohttp
import msgspec
import pytest

from prefixpool import wire
from prefixpool_testing.eventually import eventually
from prefixpool_testing.pool_client import CHAT, PoolClient, chat
from prefixpool_testing.sim_pool import PoolOptions, SimPool, text
from prefixpool_testing.traffic import clients_of, traffic

POOL = PoolOptions(replicas=3, routers=2, device_blocks=2000, time_scale=0.1)
SEED = int(os.environ.get("SOAK_SEED", "1"))


class Chaos:
    """One accident after the other; each is over before the next."""

    def __init__(self, pool: SimPool, draw: Random) -> None:
        self._pool = pool
        self._draw = draw
        self.accidents: Counter[str] = Counter()

    async def run(self, seconds: float) -> None:
        ends_s = time.monotonic() + seconds
        kinds: list[Callable[[str], Awaitable[None]]] = [
            *(self.engine_dies, self.engine_is_stopped, self.engine_sleeps, self.agent_dies, self.agent_sleeps),
            *(self.router_dies, self.router_is_stopped, self.replica_is_fenced, self.replica_comes_and_goes),
        ]
        while time.monotonic() < ends_s:
            kind = self._draw.choice(kinds)
            self.accidents[kind.__name__] += 1
            await kind(self._draw.choice(self._pool.names))
            await self._pool.usable()
            await asyncio.sleep(self._draw.random())

    async def engine_dies(self, name: str) -> None:
        self._pool.local.kill(name, "engine")
        await self._back(name)

    async def engine_is_stopped(self, name: str) -> None:
        self._pool.local.kill(name, "engine", signal.SIGTERM)
        await self._back(name)

    async def engine_sleeps(self, name: str) -> None:
        self._pool.local.kill(name, "engine", signal.SIGSTOP)
        await asyncio.sleep(4 * self._draw.random())
        self._pool.local.kill(name, "engine", signal.SIGCONT)

    async def agent_dies(self, name: str) -> None:
        self._pool.local.kill(name, "agent")

    async def agent_sleeps(self, name: str) -> None:
        self._pool.local.kill(name, "agent", signal.SIGSTOP)
        await asyncio.sleep(4 * self._draw.random())
        self._pool.local.kill(name, "agent", signal.SIGCONT)

    async def router_dies(self, _name: str) -> None:
        await self._restart(self._draw.randrange(2), signal.SIGKILL)

    async def router_is_stopped(self, _name: str) -> None:
        await self._restart(self._draw.randrange(2), signal.SIGTERM)

    async def replica_is_fenced(self, name: str) -> None:
        request = msgspec.json.encode(wire.DrainRequest(stop=False, wait=True))
        assert (await self._pool.agent(name).post("/drain", request)).status == 200
        assert (await self._pool.agent(name).delete("/drain")).status == 200

    async def replica_comes_and_goes(self, _name: str) -> None:
        name = await self._pool.local.add()
        await self._pool.usable(name)
        await self._pool.local.remove(name)

    async def _back(self, name: str) -> None:
        """Wait out the pause before the restart, or `usable` would look before routers know."""

        async def gone() -> bool:
            return not any(view.usable for view in await self._pool.views(name))

        await eventually(gone, what=f"{name} is gone")
        await eventually(lambda: self._usable(name), within_s=60, what=f"{name} is back")

    async def _usable(self, name: str) -> bool:
        return all(view.usable for view in await self._pool.views(name))

    async def _restart(self, number: int, sig: signal.Signals) -> None:
        process = self._pool.local.routers[number].process
        assert process is not None
        self._pool.local.kill(f"router-{number}", "router", sig)
        assert await process.wait(30)
        await self._pool.local.start_router(number)


class Streams:
    """Streams one after the other, never stuck: whole, ended by an error event or by a stopping engine's `abort`,
    or cut with their router."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        self.stopped = False

    async def run(self, client: PoolClient, lane: int) -> None:
        number = 0
        while not self.stopped:
            number += 1
            body = chat(text(f"{lane} {number} in chaos", 20), max_tokens=200, min_tokens=200)
            try:
                async with client.stream(CHAT, body) as stream:
                    await stream.rest()
            except aiohttp.ClientConnectionError:  # its router is gone
                self.ends["not begun"] += 1
                await asyncio.sleep(0.05)
                continue
            reasons = {choice.get("finish_reason") for event in stream.events for choice in event.get("choices", ())}
            if stream.done:
                self.ends["aborted" if "abort" in reasons else "whole"] += 1
            elif stream.errors:
                self.ends["error event"] += 1
            else:
                self.ends["cut" if stream.cut else f"strange: {stream.status} {stream.events[-1:]}"] += 1


@pytest.mark.timeout(3600)
async def test_deaths_at_any_moment_cost_no_whole_answer_and_hang_no_stream(pool: SimPool, soak_s: float) -> None:
    chaos, lanes = Chaos(pool, Random(SEED)), Streams()
    streaming = [asyncio.create_task(lanes.run(clients_of(pool)[lane % 2], lane)) for lane in range(6)]
    try:
        async with traffic(clients_of(pool), name="chaos") as seen:
            await chaos.run(soak_s)
    finally:
        lanes.stopped = True
        await asyncio.gather(*streaming)
    print(f"seed {SEED}: {dict(chaos.accidents)}; {seen.served.total()} answers, streams {dict(lanes.ends)}")
    assert not seen.failures
    assert set(lanes.ends) <= {"whole", "aborted", "error event", "cut", "not begun"}
    await pool.settled()
