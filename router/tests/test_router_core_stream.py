"""Agent streams over real WebSockets: pictures, silence, nonsense, restarts, fences."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from prefixpool import wire
from prefixpool.wire import Mode, State, Tier
from prefixpool_router import fleet_tasks
from prefixpool_router.agent_stream import AgentStream
from prefixpool_router.fleet import Fleet, FleetSettings
from prefixpool_router.fleet_tasks import FleetTasks
from prefixpool_router.knowledge import Knowledge
from prefixpool_router.membership import Member
from prefixpool_router.metrics import RoutingMetrics
from prefixpool_router.pictures import Account
from prefixpool_router.replica import Replica
from prefixpool_testing.fake_agent import FakeAgent

HASHES = [(i + 1) * 0x9E3779B97F4A7C15 % 2**64 for i in range(5000)]
DEPTHS = [64 * (i + 1) for i in range(5000)]


class ScriptedMembers:
    """Sets put in by the test."""

    problem = ""

    def __init__(self) -> None:
        self._sets: asyncio.Queue[tuple[Member, ...]] = asyncio.Queue()

    def become(self, *members: Member) -> None:
        self._sets.put_nowait(members)

    async def updates(self) -> AsyncGenerator[tuple[Member, ...], None]:
        while True:
            yield await self._sets.get()


class Watch:
    """One router's knowledge, kept alive."""

    def __init__(self, fleet: Fleet, members: ScriptedMembers) -> None:
        self.fleet = fleet
        self.members = members

    @property
    def replica(self) -> Replica:
        return self.fleet.replicas["a"]

    @property
    def verdict(self) -> tuple[bool, Mode, str]:
        """Usable, mode, why that mode."""
        usable, mode, _, mode_why = self.fleet.verdict("a")
        return usable, mode, mode_why

    def depth(self, hashes: list[int] = HASHES) -> int:
        levels = self.fleet.knowledge.walk(hashes, 16).levels
        return max((level.tokens for level in levels if level.held & self.replica.candidate.bit), default=0)


NOBODY = "http://127.0.0.1:1"


async def until(condition: Callable[[], bool], what: str = "") -> None:
    """Within 5 s."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event of its own)
            await asyncio.sleep(0.005)


@asynccontextmanager
async def watching(agent: FakeAgent, *, key: str = "", grace_s: float = 0.0, engine: str = NOBODY) -> AsyncIterator[Watch]:
    metrics = RoutingMetrics(CollectorRegistry())
    settings = FleetSettings(agent_grace_s=grace_s)
    fleet = Fleet(Knowledge(64 << 20), metrics, settings, time.monotonic)
    members = ScriptedMembers()
    async with aiohttp.ClientSession() as http:
        tasks = FleetTasks(fleet, members, http, router="test", key=lambda: key, probe_interval_s=0.02)
        running = asyncio.create_task(tasks.run())
        try:
            members.become(Member(name="a", engine=engine, agent=agent.url))
            await until(lambda: "a" in fleet.replicas)
            yield Watch(fleet, members)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is noticed in a tenth of a second, and the fleet's clock ticks faster."""
    monkeypatch.setattr(fleet_tasks, "TICK_S", 0.02)
    defaults = AgentStream.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "stale_after_s", 0.1)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection is lost by mere silence."""
    monkeypatch.setitem(AgentStream.__init__.__kwdefaults__, "stale_after_s", 60.0)


@pytest.fixture
async def agent() -> AsyncIterator[FakeAgent]:
    fake = FakeAgent("a", heartbeat=False)
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def engine() -> AsyncIterator[str]:
    """Answers probes."""
    app = web.Application()
    app.router.add_get("/health", _ok)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def _ok(_request: web.Request) -> web.Response:
    return web.Response()


@asynccontextmanager
async def heartbeat(agent: FakeAgent) -> AsyncIterator[None]:
    async def beat() -> None:
        while True:
            await asyncio.sleep(0.02)
            await agent.send(agent.load)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_fresh_router_learns_everything_from_the_snapshot(agent: FakeAgent) -> None:
    await agent.hold(HASHES, DEPTHS)
    await agent.hold(HASHES[:10], DEPTHS[:10], Tier.HOST)
    async with heartbeat(agent), watching(agent) as watch:
        await until(lambda: watch.replica.pictures.account is Account.WHOLE)
        assert watch.verdict == (True, Mode.PRECISE, "")
        assert watch.depth() == DEPTHS[-1]
        facts = watch.replica.pictures.facts
        assert facts is not None
        assert facts.boundaries == len(HASHES)


async def test_deltas_follow(agent: FakeAgent) -> None:
    async with heartbeat(agent), watching(agent) as watch:
        await until(lambda: watch.replica.pictures.account is Account.WHOLE)
        await agent.hold(HASHES[:3], DEPTHS[:3])
        await until(lambda: watch.depth() == DEPTHS[2])
        await agent.drop(HASHES[2:3])
        await until(lambda: watch.depth() == DEPTHS[1])
        await agent.report(wire.Load(inflight=4, prefill_backlog_tokens=99))
        await until(lambda: watch.replica.candidate.inflight == 4)
        assert watch.replica.candidate.pending_tokens == 99


async def test_warming_is_visible_until_the_picture_is_whole(agent: FakeAgent) -> None:
    agent.hold_snapshots = True
    await agent.hold(HASHES, DEPTHS)
    async with heartbeat(agent), watching(agent) as watch:
        await until(lambda: watch.replica.pictures.account is Account.WARMING)
        await until(lambda: watch.verdict == (True, Mode.PRECISE, "warming"))
        assert watch.fleet.readiness("")[0] is False
        await agent.release_snapshots()
        await until(lambda: watch.fleet.readiness("")[0])
        assert watch.depth() == DEPTHS[-1]


async def test_a_silent_agent_is_missed_and_its_replica_approximated(agent: FakeAgent, engine: str) -> None:
    await agent.hold(HASHES, DEPTHS)
    async with watching(agent, engine=engine) as watch:
        async with heartbeat(agent):
            await until(lambda: watch.verdict == (True, Mode.PRECISE, ""))
        agent.silent = True
        await until(lambda: watch.verdict == (True, Mode.APPROXIMATE, "agent silent for 0.1 s"))
        assert watch.depth() == DEPTHS[-1]  # as history
        agent.silent = False
        async with heartbeat(agent):
            await until(lambda: watch.verdict == (True, Mode.PRECISE, ""))
        assert watch.replica.losses >= 1


async def test_a_killed_agent_that_returns_is_known_precisely_again(agent: FakeAgent, engine: str) -> None:
    await agent.hold(HASHES, DEPTHS)
    async with watching(agent, engine=engine) as watch:
        async with heartbeat(agent):
            await until(lambda: watch.verdict == (True, Mode.PRECISE, ""))
            port = agent.port
            await agent.stop()
            await until(lambda: watch.verdict[1] is Mode.APPROXIMATE)
        await agent.start(port)
        async with heartbeat(agent):
            await until(lambda: watch.verdict == (True, Mode.PRECISE, ""))
        assert watch.depth() == DEPTHS[-1]


async def test_a_restarted_engine_holds_nothing(agent: FakeAgent) -> None:
    await agent.hold(HASHES, DEPTHS)
    async with heartbeat(agent), watching(agent) as watch:
        await until(lambda: watch.depth() == DEPTHS[-1])
        await agent.restart_engine()
        await until(lambda: watch.depth() == 0)
        await until(lambda: watch.verdict == (True, Mode.PRECISE, ""))
        assert watch.replica.status is not None
        assert watch.replica.status.epoch == 2


async def test_a_fence_is_acknowledged_after_the_replica_is_out(agent: FakeAgent) -> None:
    async with heartbeat(agent), watching(agent) as watch:
        await until(lambda: watch.verdict[0])
        await agent.tell(State.FENCED, reason="draining")
        await until(lambda: agent.acknowledged == [1])
        assert len(watch.fleet.candidates) == 0
        assert watch.fleet.verdict("a").why == "engine is fenced: draining"


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (b"\xc1 no messagepack", "nonsense"),
        (wire.encode(wire.Publish(tier=Tier.DEVICE, hashes=b"1234567", depths=b"")), "nonsense"),
        (wire.encode(wire.Publish(tier=Tier.DEVICE, hashes=b"12345678", depths=b"")), "1 boundaries with 0 depths"),
        (wire.encode(wire.Publish(tier=Tier.ABSENT, hashes=b"", depths=b"")), "absent"),
        (wire.encode(wire.Costs(prefill_s_per_token=float("nan"))), "no durations"),
        (wire.encode(wire.Costs(decode_step_s=-1.0)), "no durations"),
        (wire.encode(wire.Welcome(replica="a", epoch=1)), "Welcome must come first, and once"),
        (wire.encode(wire.Welcome(replica="a", epoch=1))[:-3], "nonsense"),
        (msgspec.msgpack.encode({"type": "status", "state": "Ready!", "epoch": 1}), "nonsense"),
        (msgspec.msgpack.encode({"type": ""}), "nonsense"),
        (msgspec.msgpack.encode({"type": "fence_ack", "epoch": 1}), "nonsense"),
    ],
)
async def test_nonsense_ends_the_stream_not_the_router(agent: FakeAgent, engine: str, frame: bytes, says: str) -> None:
    agent.garbage = frame
    async with heartbeat(agent), watching(agent, engine=engine) as watch:
        await until(lambda: says in watch.verdict[2])
        agent.garbage = None
        await until(lambda: watch.verdict == (True, Mode.PRECISE, ""))


async def test_a_defect_met_through_one_agent_is_told_and_does_not_freeze_its_replica(
    agent: FakeAgent, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with heartbeat(agent), watching(agent, engine=engine) as watch:
        await until(lambda: watch.verdict == (True, Mode.PRECISE, ""))
        with monkeypatch.context() as broken:
            broken.setattr(watch.replica, "published", lambda *_: 1 // 0)
            await agent.hold(HASHES[:1], DEPTHS[:1])
            await until(lambda: "defect of this router: ZeroDivisionError" in watch.verdict[2])
        await until(lambda: watch.verdict == (True, Mode.PRECISE, ""))
        assert watch.depth() == DEPTHS[0]


@pytest.mark.parametrize(
    "addition",
    [
        {"type": "ledger", "reserved": [1, 2]},
        {"type": "publish", "tier": 4, "hashes": wire.pack_hashes(HASHES), "depths": wire.pack_depths(DEPTHS)},
        {"type": "retract", "tier": 4, "hashes": wire.pack_hashes(HASHES)},
        {"type": "load", "inflight": 0, "speculating": True},
    ],
)
async def test_an_addition_of_a_newer_agent_ended_the_stream(
    agent: FakeAgent, patience: None, addition: dict[str, object]
) -> None:
    async with heartbeat(agent), watching(agent) as watch:
        await agent.hold(HASHES[:1], DEPTHS[:1])
        await until(lambda: watch.verdict == (True, Mode.PRECISE, "") and watch.depth() == DEPTHS[0])
        await agent.send_raw(msgspec.msgpack.encode(addition))
        await agent.hold(HASHES[1:], DEPTHS[1:])
        await until(lambda: watch.depth() == DEPTHS[-1])
        assert agent.connections == 1


async def test_a_state_that_only_newer_agents_know_ended_the_stream(agent: FakeAgent, patience: None) -> None:
    """Now the replica gets nothing new, and goes on with what it has."""
    async with heartbeat(agent), watching(agent) as watch:
        await until(lambda: watch.verdict == (True, Mode.PRECISE, ""))
        told = {"type": "status", "state": "sleeping", "epoch": agent.status.epoch, "reason": "asleep until asked"}
        await agent.send_raw(msgspec.msgpack.encode(told))
        await until(lambda: watch.fleet.verdict("a").why == "engine is fenced: asleep until asked")
        await agent.tell(State.READY)
        await until(lambda: watch.verdict == (True, Mode.PRECISE, ""))
        assert agent.connections == 1


async def test_another_version_is_named(agent: FakeAgent) -> None:
    agent.version = 999
    async with watching(agent) as watch:
        await until(lambda: "does not speak version 1" in watch.verdict[2])


async def test_a_refused_key_is_named(agent: FakeAgent) -> None:
    agent.key = "right"
    async with watching(agent, key="wrong", grace_s=60) as watch:
        await until(lambda: "refuses the engine key" in watch.verdict[2])
    async with heartbeat(agent), watching(agent, key="right") as watch:
        await until(lambda: watch.verdict[0])


async def test_queued_events_of_a_deleted_replica_leave_nothing(agent: FakeAgent) -> None:
    async with heartbeat(agent), watching(agent) as watch:
        await until(lambda: watch.verdict[0])
        for i in range(1000):
            await agent.hold(HASHES[i * 5 : i * 5 + 5], DEPTHS[i * 5 : i * 5 + 5])
            if i == 500:
                watch.members.become()
        await until(lambda: not watch.fleet.replicas)
        await until(lambda: len(watch.fleet.knowledge.index) == 0)
        await asyncio.sleep(0.05)
        assert len(watch.fleet.knowledge.index) == 0
        assert agent.connected == 0


async def test_an_agent_at_a_new_address_is_followed(agent: FakeAgent, engine: str) -> None:
    other = FakeAgent("a", heartbeat=False)
    await other.start()
    await other.hold(HASHES[:1], DEPTHS[:1])
    try:
        async with heartbeat(agent), heartbeat(other), watching(agent, engine=engine) as watch:
            await until(lambda: watch.verdict[0])
            replica = watch.replica
            watch.members.become(Member(name="a", engine=engine, agent=other.url))
            await until(lambda: watch.depth() == DEPTHS[0])
            assert watch.replica is replica
            await until(lambda: agent.connected == 0)
    finally:
        await other.stop()


class Recorder:
    """A sink that notes how much came in which turn of the event loop."""

    def __init__(self) -> None:
        self.turn = 0
        self.pieces: list[tuple[int, int]] = []
        self.whole = False

    def published(self, tier: Tier, hashes: array[int], depths: array[int]) -> None:
        self.pieces.append((self.turn, len(hashes)))

    def snapshot_ended(self, end: wire.SnapshotEnd) -> None:
        self.whole = True

    def __getattr__(self, name: str) -> Callable[[object], None]:
        return lambda _: None


async def test_snapshots_of_all_replicas_are_fed_a_piece_per_turn_of_the_loop() -> None:
    """So that requests come in between, even while a router starts and every agent sends 100,000 boundaries at once."""
    agents = [FakeAgent(name, heartbeat=False) for name in ("a", "b")]
    sinks, feed = [Recorder() for _ in agents], asyncio.Lock()
    many = [(i + 1) * 0x9E3779B97F4A7C15 % 2**64 for i in range(20_000)]
    async with aiohttp.ClientSession() as http:
        streams = []
        for agent, sink in zip(agents, sinks, strict=True):
            agent.resident[Tier.DEVICE] = dict.fromkeys(many, 64)
            await agent.start()
            options = {"router": "r", "key": str, "feed": feed, "draw": float}
            streams.append(asyncio.create_task(AgentStream(http, agent.url, sink, **options).run()))
        async with asyncio.timeout(5):
            while not all(sink.whole for sink in sinks):
                for sink in sinks:
                    sink.turn += 1
                await asyncio.sleep(0)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    for agent in agents:
        await agent.stop()
    pieces = [piece for sink in sinks for piece in sink.pieces]
    assert sum(size for _, size in pieces) == 2 * len(many)
    assert max(Counter(turn for turn, _ in pieces).values()) == 1
    assert max(size for _, size in pieces) <= 2000


async def test_a_replica_whose_agent_never_appears_is_used_after_a_grace_time(agent: FakeAgent, engine: str) -> None:
    await agent.stop()
    async with watching(agent, grace_s=0.05, engine=engine) as watch:
        assert watch.verdict[0] is False
        await until(lambda: watch.verdict[0])
        assert watch.verdict[1] is Mode.APPROXIMATE
        assert "no connection" in watch.verdict[2]


async def test_one_whose_engine_does_not_answer_either_stays_out(agent: FakeAgent) -> None:
    await agent.stop()
    async with watching(agent, grace_s=0.05) as watch:
        await until(lambda: "down: no connection" in watch.fleet.verdict("a").why)
        assert watch.verdict[:2] == (False, Mode.APPROXIMATE)
