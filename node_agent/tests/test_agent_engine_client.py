"""The agent's requests to its engine and its supervisor: right figures, deadlines, bounded answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from prefixpool_agent import engine_client, supervisor_client
from prefixpool_agent.engine_client import EngineClient, EngineError
from prefixpool_agent.engine_watch import EngineWatch
from prefixpool_agent.supervisor_client import EnginePhase, SupervisorClient, SupervisorError, read_state

METRICS = """vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_waiting{engine="0"} 3.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:cache_config_info{block_size="32",num_gpu_blocks="101"} 1.0
"""


class Engine:
    def __init__(self) -> None:
        self.metrics = METRICS
        self.status = 200
        self.delay_s = 0.0
        self.keys: list[str] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers["authorization"])
        await asyncio.sleep(self.delay_s)
        texts = {
            "/metrics": self.metrics,
            "/version": '{"version": "0.32.0"}',
            "/v1/models": '{"data": [{"id": "m"}, {"id": "adapter"}]}',
        }
        return web.Response(text=texts.get(request.path, ""), status=self.status)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
async def client(engine: Engine, tmp_path: Path) -> AsyncIterator[EngineClient]:
    (tmp_path / "key").write_text("first\nsecond\n")
    async with TestServer(engine.app()) as server, aiohttp.ClientSession() as session:
        yield EngineClient(session, str(server.make_url("/")), tmp_path / "key")


async def test_facts_are_what_the_engine_allocated(client: EngineClient, engine: Engine) -> None:
    facts = await client.facts()
    assert (facts.block_tokens, facts.device_blocks, facts.device_tokens) == (32, 100, 3200)  # without the null block
    assert (facts.models, facts.version) == (("m", "adapter"), "0.32.0")
    assert set(engine.keys) == {"Bearer first"}


async def test_load(client: EngineClient) -> None:
    load = await client.load()
    assert (load.running, load.waiting, load.kv_usage) == (2, 3, 0.25)


async def test_engine_without_cache_figures_is_not_known_yet(client: EngineClient, engine: Engine) -> None:
    engine.metrics = ""
    with pytest.raises(EngineError, match="KV cache"):
        await client.facts()


async def test_error_status_is_a_certain_failure(client: EngineClient, engine: Engine) -> None:
    assert (await client.health()).good
    engine.status = 503
    health = await client.health()
    assert (health.good, health.certain, health.reason) == (False, True, "/health answered 503")


async def test_late_answer_is_an_uncertain_failure(
    client: EngineClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "HEALTH_S", 0.02)
    engine.delay_s = 0.5
    health = await client.health()
    assert (health.good, health.certain) == (False, False)


async def test_huge_answer_is_cut(client: EngineClient, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "MAX_BYTES", len(METRICS))
    engine.metrics = METRICS + "x" * 1000
    assert (await client.load()).running == 2


def write_state(folder: Path, **engine: object) -> None:
    process = {"pid": 5, "epoch": 9, "phase": "running", "restarts": 1, "reason": "", "started_ns": 9, "shm": []} | engine
    (folder / "supervisor.json").write_text(json.dumps({"pid": 1, "engine": process, "agent": {"pid": 2, "restarts": 0}}))


def test_supervisor_state_is_read(tmp_path: Path) -> None:
    assert read_state(tmp_path) is None
    write_state(tmp_path)
    state = read_state(tmp_path)
    assert state is not None
    assert (state.engine.phase, state.engine.epoch, state.agent.pid) == (EnginePhase.RUNNING, 9, 2)


def test_unknown_phase_is_an_error_not_a_guess(tmp_path: Path) -> None:
    write_state(tmp_path, phase="thinking")
    with pytest.raises(SupervisorError, match="phase"):
        read_state(tmp_path)


@pytest.mark.parametrize(
    ("answer", "error"),
    [(b'{"pid": 1}\n', ""), (b'{"error": "busy"}\n', "busy"), (b"nonsense\n", "stop_engine"), (b"", "stop")],
)
async def test_stop_command(tmp_path: Path, answer: bytes, error: str) -> None:
    got: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.append(await reader.readline())
        writer.write(answer)
        writer.close()

    server = await asyncio.start_unix_server(serve, tmp_path / "supervisor.sock")
    client = SupervisorClient(tmp_path)
    if error:
        with pytest.raises(SupervisorError, match=error):
            await client.stop_engine(7.0)
    else:
        await client.stop_engine(7.0)
    assert json.loads(got[0]) == {"cmd": "stop_engine", "timeout_s": 7.0}
    server.close()


async def test_supervisor_that_never_answers_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_client, "ANSWER_S", 0.01)
    monkeypatch.setattr(supervisor_client, "KILL_AFTER_S", 0.01)

    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        closed.set()

    server = await asyncio.start_unix_server(serve, tmp_path / "supervisor.sock")
    with pytest.raises(SupervisorError, match="no answer"):
        await SupervisorClient(tmp_path).stop_engine(0.01)
    await closed.wait()
    server.close()


async def test_watch_tells_a_crash_at_once_and_trusts_no_answer_of_before_it(client: EngineClient, tmp_path: Path) -> None:
    async def ignore(look: object) -> None:
        pass

    watch = EngineWatch(tmp_path, client, ignore)
    assert watch.look().process.phase is EnginePhase.BACKOFF  # nothing is known yet
    write_state(tmp_path)
    async with asyncio.timeout(5):
        while not watch.look().healthy:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    write_state(tmp_path, phase="backoff", reason="signal 9")
    look = watch.look()
    assert (look.healthy, look.reason) == (False, "signal 9")
    write_state(tmp_path, epoch=10)
    assert not watch.look().healthy
    await watch.close()
