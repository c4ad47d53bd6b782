"""Connections that break or go dead, and members that come and go, seen by a real router process (peers.md 3.B and 3.C)."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from prefixpool import wire
from prefixpool_cli.pool_spec import MemberRow
from prefixpool_testing.backend import Backend, Broken, Scripted, Stream, Then, as_json, event
from prefixpool_testing.eventually import eventually
from prefixpool_testing.fake_agent import FakeAgent
from prefixpool_testing.pool_client import CHAT, chat
from prefixpool_testing.router_program import MODEL, RouterProgram, router_program
from prefixpool_testing.tcp_link import Link

TOLD_S, GONE_S, WELL_AGAIN_S = 2.0, 5.0, 10.0  # what is promised
TOKEN = event({"choices": [{"index": 0, "delta": {"content": "t"}, "finish_reason": None}]})
ANSWER = as_json({"choices": [{"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}]})
EMBED = "/v1/embeddings"  # has no prefix chain: goes by load alone


class Replica:
    """A scripted engine and a fake agent, each behind a way that can be cut."""

    def __init__(self, name: str, engine: Backend, agent: FakeAgent, engine_link: Link, agent_link: Link) -> None:
        self.name = name
        self.engine = engine
        self.agent = agent
        self.engine_link = engine_link
        self.agent_link = agent_link

    @property
    def row(self) -> MemberRow:
        return MemberRow(self.name, self.engine_link.url, self.agent_link.url)

    @property
    def asked(self) -> int:
        """Requests for inference that reached it."""
        return sum(received.method == "POST" for received in self.engine.received)


class World:
    def __init__(self, router: RouterProgram, replicas: list[Replica]) -> None:
        self.router = router
        self.replicas = replicas

    def answer(self, scripted: Scripted) -> None:
        """What engines do from now on."""
        for replica in self.replicas:
            replica.engine.default = scripted

    async def ask(self, requests: int) -> Counter[str]:
        """So many different chats, one after the other, all answered; by replica."""
        replies = [await self.router.client.chat(f"{i} {requests} something new") for i in range(requests)]
        return Counter(reply.replica for reply in replies)

    @asynccontextmanager
    async def held(self, requests: int) -> AsyncIterator[Counter[str]]:
        """So many requests without a prefix, which their engines do not answer; by replica."""
        before = Counter({replica.name: replica.asked for replica in self.replicas})
        self.answer(Broken(Then.HANG))
        asking = [asyncio.create_task(self.router.client.post(EMBED, {"input": "x"})) for _ in range(requests)]

        async def check() -> bool:
            return sum(replica.asked for replica in self.replicas) == before.total() + requests

        try:
            await eventually(check, what="all requests in engines")
            yield Counter({replica.name: replica.asked for replica in self.replicas}) - before
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            self.answer(ANSWER)


@pytest.fixture
async def started(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Makes a router with so many replicas."""
    async with AsyncExitStack() as stack:

        async def replica(name: str) -> Replica:
            engine = await stack.enter_async_context(Backend(ANSWER))
            agent = FakeAgent(name)
            agent.welcome = wire.Welcome(replica=name, epoch=1, block_tokens=16, device_tokens=100_000, models=(MODEL,))
            await agent.start()
            stack.push_async_callback(agent.stop)
            links = [await stack.enter_async_context(Link(url)) for url in (engine.url, agent.url)]
            return Replica(name, engine, agent, *links)

        async def start(count: int, *flags: str) -> World:
            replicas = [await replica(f"p-{i}") for i in range(count)]
            router = await stack.enter_async_context(router_program(tmp_path, [each.row for each in replicas], *flags))
            return World(router, replicas)

        yield start


async def test_member_that_is_gone_from_the_file_is_gone_from_routing__peers_35(started: Callable[..., Any]) -> None:
    world: World = await started(3)
    gone, *rest = world.replicas
    world.router.members_file.unlink()  # as a watch that breaks
    assert set(await world.ask(12)) == {each.name for each in world.replicas}, "what was known last still holds"
    world.router.tell([each.row for each in rest])

    async def check() -> bool:
        return await world.router.view(gone.name) is None

    await eventually(check, within_s=GONE_S, what=f"{gone.name} is gone")
    assert gone.name not in await world.ask(12)
    world.router.tell([])

    async def not_ready() -> bool:
        return not (await world.router.ready()).ready

    await eventually(not_ready, within_s=GONE_S, what="not ready")
    assert (await world.router.ready()).words.count("no members")
    refused = await world.router.client.post(CHAT, chat("nobody is there"))
    assert (refused.status, refused.headers["retry-after"]) == (503, "10")
    world.router.tell([each.row for each in rest])
    await world.router.until_ready()


async def test_readiness_follows_the_engines__peers_35(started: Callable[..., Any]) -> None:
    world: World = await started(2)
    for replica in world.replicas:
        await replica.agent.tell(wire.State.STARTING, reason="loading")
        await world.router.until(replica.name, usable=False, within_s=TOLD_S)
    ready = await world.router.ready()
    assert not ready.ready
    assert "engine is starting: loading" in ready.words
    await world.replicas[0].agent.tell(wire.State.READY)
    await world.router.until_ready()


async def test_engine_that_still_loads_gets_nothing__peers_37(started: Callable[..., Any]) -> None:
    world: World = await started(3)
    loading = world.replicas[0]
    await loading.agent.tell(wire.State.STARTING, reason="loading weights")
    await world.router.until(loading.name, usable=False, within_s=TOLD_S)
    await world.ask(40)
    assert loading.asked == 0
    await loading.agent.tell(wire.State.READY)
    await world.router.until(loading.name, usable=True, within_s=TOLD_S)
    assert (await world.ask(40))[loading.name]


async def test_loads_that_nobody_reports_any_more_are_no_saturation__peers_32(started: Callable[..., Any]) -> None:
    world: World = await started(3)
    for number, replica in enumerate(world.replicas):
        await replica.agent.report(wire.Load(inflight=200 * number, waiting=200 * number, prefill_backlog_tokens=10**6))
    async with world.held(6) as held:
        assert held == {"p-0": 6}, "reports are believed as long as they come"
    for replica in world.replicas:
        replica.agent.silent = True
    for replica in world.replicas:
        await world.router.until(replica.name, usable=True, mode="approximate", within_s=GONE_S)
    async with world.held(12) as held:
        assert held == {"p-0": 4, "p-1": 4, "p-2": 4}, "own requests in flight decide"


@pytest.mark.parametrize("how", ["cut", "freeze"])
async def test_lost_way_to_the_agents_costs_no_request(started: Callable[..., Any], how: str) -> None:
    world: World = await started(2)
    for replica in world.replicas:
        getattr(replica.agent_link, how)()
    await world.ask(20)
    for replica in world.replicas:
        await world.router.until(replica.name, usable=True, mode="approximate", within_s=GONE_S)
    assert len(await world.ask(20)) == 2
    for replica in world.replicas:
        await replica.agent_link.heal()
    for replica in world.replicas:
        await world.router.until(replica.name, usable=True, mode="precise", within_s=WELL_AGAIN_S)


async def test_lost_way_to_an_engine_ends_its_streams_and_is_found_again(started: Callable[..., Any]) -> None:
    world: World = await started(2)
    world.answer(Stream(TOKEN, then=Then.HANG))
    async with world.router.client.stream(CHAT, chat("cut off")) as stream:
        await stream.begin()
        lost = next(replica for replica in world.replicas if replica.name == stream.replica)
        lost.engine_link.cut()
        async with asyncio.timeout(10):
            await stream.rest()
    assert len(stream.errors) == 1
    assert not stream.done
    world.answer(ANSWER)
    assert lost.name not in await world.ask(30)
    await world.router.until(lost.name, usable=False, within_s=TOLD_S)
    await lost.engine_link.heal()
    await world.router.until(lost.name, usable=True, within_s=WELL_AGAIN_S)


async def test_dead_way_to_an_engine_hangs_nobody(started: Callable[..., Any]) -> None:
    world: World = await started(2, "--silence-timeout-s", "1")
    world.answer(Stream(TOKEN, then=Then.HANG))
    async with world.router.client.stream(CHAT, chat("goes dead")) as stream:
        await stream.begin()
        dead = next(replica for replica in world.replicas if replica.name == stream.replica)
        dead.engine_link.freeze()
        async with asyncio.timeout(10):
            await stream.rest()
    assert [event["error"]["message"] for event in stream.errors] == ["The engine fell silent in the middle of its answer."]


async def test_machine_that_swallows_connections_is_left_for_another(started: Callable[..., Any]) -> None:
    world: World = await started(1, "--connect-timeout-s", "0.3")
    with socket.socket() as silent, socket.socket() as filler, socket.socket() as more:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)  # and nobody accepts: once the queue is full, the kernel answers no further connection
        for sock in (filler, more):
            sock.setblocking(False)
            sock.connect_ex(silent.getsockname())
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        agent = FakeAgent("dead")
        agent.welcome = wire.Welcome(replica="dead", epoch=1, block_tokens=16, device_tokens=100_000, models=(MODEL,))
        await agent.start()
        try:
            world.router.tell([world.replicas[0].row, MemberRow("dead", url, agent.url)])
            await world.router.until("dead", usable=True, within_s=GONE_S)
            assert await world.ask(20) == {"p-0": 20}
            await world.router.until("dead", usable=False, within_s=TOLD_S)
        finally:
            await agent.stop()
