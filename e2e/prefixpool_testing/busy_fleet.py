"""A hundred replicas for one router process: fake agents that report and publish as living ones do, one engine for all."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

from prefixpool import wire
from prefixpool.wire import Tier
from prefixpool_cli.pool_spec import MemberRow
from prefixpool_testing.backend import Backend, as_json
from prefixpool_testing.fake_agent import FakeAgent
from prefixpool_testing.router_program import MODEL, RouterProgram, router_program

LOADS_PER_S: Final = 5
CHANGED: Final = 20  # boundaries that come and go with each load
_ANSWER: Final = as_json(
    {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 500, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}},
    }
)


class BusyFleet:
    """`router` in front of `agents`."""

    def __init__(self, router: RouterProgram, agents: list[FakeAgent]) -> None:
        self.router = router
        self.agents = agents

    async def publish(self, agent: FakeAgent, boundaries: int) -> None:
        """So many boundaries that nobody has published before."""
        hashes, depths = os.urandom(8 * boundaries), wire.pack_depths([64] * boundaries)
        await agent.send(wire.Publish(tier=Tier.DEVICE, hashes=hashes, depths=depths))

    async def live(self, seconds: float) -> None:
        """What living agents tell, and a client with ever new prompts."""
        async with asyncio.TaskGroup() as group:
            for number, agent in enumerate(self.agents):
                group.create_task(self._tell(agent, number, int(seconds * LOADS_PER_S)))
            group.create_task(self._ask(seconds))

    async def _tell(self, agent: FakeAgent, number: int, times: int) -> None:
        await asyncio.sleep(number / len(self.agents) / LOADS_PER_S)
        for turn in range(times):
            await agent.report(wire.Load(inflight=(turn + number) % 32, free_blocks=turn % 1000))
            hashes, depths = os.urandom(8 * CHANGED), wire.pack_depths([64] * CHANGED)
            await agent.send(wire.Publish(tier=Tier.DEVICE, hashes=hashes, depths=depths))
            await agent.send(wire.Retract(tier=Tier.DEVICE, hashes=hashes))
            await asyncio.sleep(1 / LOADS_PER_S)

    async def _ask(self, seconds: float) -> None:
        for turn in range(int(seconds * 20)):
            await self.router.client.chat(f"{turn} {os.urandom(8).hex()} " + "new words " * 200)
            await asyncio.sleep(0.05)


@asynccontextmanager
async def busy_fleet(folder: Path, agents: int, *flags: str) -> AsyncIterator[BusyFleet]:
    """A router that knows so many agents."""
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(Backend(_ANSWER))
        fakes = [FakeAgent(f"p-{number}") for number in range(agents)]
        for fake in fakes:
            fake.welcome = wire.Welcome(
                replica=fake.replica, epoch=1, block_tokens=16, device_tokens=100_000, models=(MODEL,)
            )
            await fake.start()
            stack.push_async_callback(fake.stop)
        rows = [MemberRow(fake.replica, engine.url, fake.url) for fake in fakes]
        yield BusyFleet(await stack.enter_async_context(router_program(folder, rows, *flags)), fakes)
