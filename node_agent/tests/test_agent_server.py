"""The agent's HTTP side, over loopback: keys, probes, drain calls, streams of slow and odd routers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import WSMsgType, WSServerHandshakeError
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry

from prefixpool import wire
from prefixpool.wire import DrainPhase, Tier
from prefixpool_agent.drain import Drain, View
from prefixpool_agent.gate.keys import KeyFile
from prefixpool_agent.metrics import AgentMetrics
from prefixpool_agent.publisher import Publisher
from prefixpool_agent.server import Server
from prefixpool_testing.agent_info import info

KEY = {"authorization": "Bearer secret"}
INFO = info("p-0", engine="sim", models=("m",), block_tokens=32, device_blocks=1, device_tokens=32)

Client = TestClient


class World:
    """Agent view and drain actions at once."""

    def __init__(self) -> None:
        self.why = ""
        self.told = INFO
        self.inflight = 0
        self.fenced = False
        self.publisher: Publisher

    def info(self) -> wire.Info:
        return self.told

    def not_ready(self) -> str:
        return self.why

    def refresh(self) -> None:
        pass

    def fence(self, on: bool) -> None:
        self.fenced = on
        if on:
            self.publisher.refence()
            self.publisher.tell(wire.Status(state=wire.State.FENCED, epoch=1))

    def view(self, now_s: float) -> View:
        return View(now_s, self.inflight, self.publisher.unacknowledged())

    async def stop_engine(self) -> None:
        pass

    async def clean(self) -> None:
        pass

    def phase_changed(self, phase: DrainPhase) -> None:
        pass


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
async def client(tmp_path: Path, world: World) -> AsyncIterator[Client]:
    (tmp_path / "key").write_text("secret\n")
    registry = CollectorRegistry()
    metrics = AgentMetrics(registry)
    world.publisher = Publisher(wire.Welcome(replica="p-0", epoch=1), lambda: (), metrics)
    drain = Drain(world, ack_s=5.0)
    server = Server(
        view=world,
        publisher=world.publisher,
        drain=drain,
        keys=KeyFile(tmp_path / "key"),
        registry=registry,
        drain_timeout_s=42.0,
    )
    async with TestClient(TestServer(server.application())) as made:
        yield made
    await drain.close()


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}])
async def test_control_needs_the_engine_key(client: Client, headers: dict[str, str]) -> None:
    for method, path in (("GET", "/info"), ("GET", "/drain"), ("POST", "/drain"), ("DELETE", "/drain"), ("GET", "/stream")):
        answer = await client.request(method, path, headers=headers)
        assert answer.status == 401


@pytest.mark.parametrize("path", ["/healthz", "/info", "/nowhere"])
async def test_answers_told_the_versions_of_python_and_aiohttp(client: Client, path: str) -> None:
    assert (await client.get(path)).headers.getall("Server") == ["prefixpool"]


async def test_probes_and_metrics_are_open(client: Client, world: World) -> None:
    assert (await client.get("/healthz")).status == 200
    assert (await client.get("/readyz")).status == 200
    assert "prefixpool_agent_routers_connected 0.0" in await (await client.get("/metrics")).text()
    world.why = "engine is starting"
    answer = await client.get("/readyz")
    assert (answer.status, await answer.text()) == (503, "engine is starting\n")


async def test_kubernetes_ended_pods_whose_download_took_long(client: Client, world: World) -> None:
    """A startup probe asks so: a download that has begun is a start that goes on, but no engine that is ready."""
    world.why = "engine is starting"
    assert (await client.get("/readyz?download=1")).status == 503
    world.told = msgspec.structs.replace(INFO, download=wire.Download(model="org/m"))
    assert (await client.get("/readyz?download=1")).status == 200
    assert (await client.get("/readyz?router=1")).status == 503
    assert (await client.get("/readyz")).status == 503


async def test_ready_with_router_waits_for_a_snapshot(client: Client) -> None:
    assert (await client.get("/readyz?router=1")).status == 503
    async with client.ws_connect("/stream", headers=KEY) as socket:
        await socket.send_bytes(wire.encode(wire.Hello(router="r")))
        while not isinstance(wire.decode_from_agent(await socket.receive_bytes(timeout=5)), wire.SnapshotEnd):
            pass
        assert (await client.get("/readyz?router=1")).status == 200


async def test_info_is_the_wire_type(client: Client) -> None:
    answer = await client.get("/info", headers=KEY)
    assert msgspec.json.decode(await answer.read(), type=wire.Info) == INFO


async def test_drain_defaults_come_from_the_settings(client: Client, world: World) -> None:
    world.inflight = 1
    answer = await client.post("/drain", headers=KEY)
    status = msgspec.json.decode(await answer.read(), type=wire.DrainStatus)
    assert answer.status == 202
    assert world.fenced
    assert 41.0 < status.remaining_s <= 42.0


async def test_drain_waits_if_asked_to(client: Client) -> None:
    answer = await client.post("/drain", headers=KEY, json={"wait": True, "timeout_s": 5})
    assert (answer.status, (await answer.json())["phase"]) == (200, "done")


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"timeout_s": "soon"}', b'{"timeout_s": -1}', b'{"unknown": 1}'])
async def test_bad_drain_request_changes_nothing(client: Client, world: World, body: bytes) -> None:
    answer = await client.post("/drain", headers=KEY, data=body)
    assert answer.status == 400
    assert not world.fenced


async def test_lifting_after_the_stop_is_a_conflict(client: Client) -> None:
    await client.post("/drain", headers=KEY, json={"wait": True})
    assert (await client.delete("/drain", headers=KEY)).status == 409


async def test_fence_waits_for_the_routers_word(client: Client, world: World) -> None:
    async with client.ws_connect("/stream", headers=KEY) as socket:
        await socket.send_bytes(wire.encode(wire.Hello(router="r")))
        await client.post("/drain", headers=KEY, json={"stop": False})
        assert (await (await client.get("/drain", headers=KEY)).json())["phase"] == "fencing"
        await socket.send_bytes(wire.encode(wire.FenceAck(epoch=1)))
        async with asyncio.timeout(3):
            while world.publisher.unacknowledged():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        async with asyncio.timeout(3):
            while (await (await client.get("/drain", headers=KEY)).json())["phase"] != "done":  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "first", [wire.encode(wire.Hello(version=wire.VERSION + 1)), b"\xc1", wire.encode(wire.FenceAck(epoch=1))]
)
async def test_other_versions_are_told_so(client: Client, first: bytes) -> None:
    async with client.ws_connect("/stream", headers=KEY) as socket:
        await socket.send_bytes(first)
        assert (await socket.receive(timeout=5)).type is WSMsgType.CLOSE
        assert socket.close_code == wire.CLOSE_VERSION


async def test_nonsense_after_the_greeting_ends_that_stream_only(
    client: Client, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefixpool_agent.server.CLOSE_S", 0.05)
    async with client.ws_connect("/stream", headers=KEY) as good, client.ws_connect("/stream", headers=KEY) as bad:
        for socket in (good, bad):
            await socket.send_bytes(wire.encode(wire.Hello(router="r")))
            await socket.receive_bytes(timeout=5)
        await bad.send_bytes(b"\xc1")
        async with asyncio.timeout(5):
            while world.publisher.connected > 1:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        world.publisher.tell(wire.Load(inflight=3))
        async with asyncio.timeout(5):
            while wire.decode_from_agent(await good.receive_bytes()) != wire.Load(inflight=3):
                pass


async def test_an_addition_of_a_newer_router_ended_its_stream(client: Client, world: World) -> None:
    async with client.ws_connect("/stream", headers=KEY) as socket:
        await socket.send_bytes(wire.encode(wire.Hello(router="r")))
        await client.post("/drain", headers=KEY, json={"stop": False})
        await socket.send_bytes(msgspec.msgpack.encode({"type": "promise", "until_s": 7}))
        await socket.send_bytes(msgspec.msgpack.encode({"type": "fence_ack", "epoch": 1, "of": "r"}))
        async with asyncio.timeout(5):
            while world.publisher.unacknowledged():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert world.publisher.connected == 1


async def test_a_bug_met_while_telling_one_router_left_it_unheard_for_ever(
    client: Client, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(world.publisher, "next_frame", lambda link: [link.name][1])
        async with client.ws_connect("/stream", headers=KEY) as socket:
            await socket.send_bytes(wire.encode(wire.Hello(router="r")))
            assert (await socket.receive(timeout=5)).type in (WSMsgType.CLOSED, WSMsgType.ERROR)
    assert "a router could not be told" in caplog.text
    assert "prefixpool_agent_streams_broken_total 1.0" in await (await client.get("/metrics")).text()
    async with client.ws_connect("/stream", headers=KEY) as socket:
        await socket.send_bytes(wire.encode(wire.Hello(router="r")))
        assert isinstance(wire.decode_from_agent(await socket.receive_bytes(timeout=5)), wire.Welcome)


async def test_router_that_never_reads_is_cut_off(client: Client, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixpool_agent.server.SEND_S", 0.05)
    async with client.ws_connect("/stream", headers=KEY) as socket:
        await socket.send_bytes(wire.encode(wire.Hello(router="slow")))
        await socket.receive_bytes(timeout=5)
        pairs = [(i, i) for i in range(100_000)]
        started = time.monotonic()
        while world.publisher.connected and time.monotonic() - started < 20:
            world.publisher.publish({Tier.DEVICE: pairs}, {})
            await asyncio.sleep(0.005)
        assert world.publisher.connected == 0


async def test_changed_facts_make_routers_connect_anew(client: Client, world: World) -> None:
    async with client.ws_connect("/stream", headers=KEY) as socket:
        await socket.send_bytes(wire.encode(wire.Hello(router="r")))
        await socket.receive_bytes(timeout=5)
        world.publisher.welcome(wire.Welcome(replica="p-0", epoch=2, device_tokens=64), "engine restarted")
        async with asyncio.timeout(5):
            while (await socket.receive()).type is WSMsgType.BINARY:
                pass
        assert socket.close_code == 1012


async def test_too_many_routers_are_refused(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixpool_agent.publisher.MAX_ROUTERS", 0)
    with pytest.raises(WSServerHandshakeError, match="503"):
        await client.ws_connect("/stream", headers=KEY)
