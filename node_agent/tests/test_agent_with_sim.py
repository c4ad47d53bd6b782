"""Worker, supervisor, gate, sim engine and agent as processes; the test is the router. Faults are real signals."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from prefixpool import wire
from prefixpool.chain import canonical, prefix_chain
from prefixpool_agent.supervisor_client import SupervisorState, read_state

KEY = {"authorization": "Bearer secret"}
SYSTEM = "You are careful. " * 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Replica:
    """One worker's addresses and state."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "r"
        self.engine_port, self.agent_port = free_port(), free_port()
        self.engine = f"http://127.0.0.1:{self.engine_port}"
        self.agent = f"http://127.0.0.1:{self.agent_port}"
        (folder / "key").write_text("secret\n")
        self._log = (folder / "worker.log").open("wb")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "prefixpool_agent.worker", "--replica", "p-0", "--run-dir", str(self.run_dir)),
                *("--model", "sim", "--served-model-name", "m", "--engine", "sim"),
                *("--engine-key-file", str(folder / "key"), "--device-blocks", "400", "--dev-mode", "true"),
                *("--engine-port", str(self.engine_port), "--agent-port", str(self.agent_port)),
                *("--", "--time-scale", "0.2"),
            ],
            stdout=self._log,
            stderr=self._log,
        )

    @property
    def state(self) -> SupervisorState:
        state = read_state(self.run_dir)
        assert state is not None
        return state

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(20)
        self._log.close()


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    with tempfile.TemporaryDirectory(prefix="pp") as folder:  # short: unix sockets
        made = Replica(Path(folder))
        try:
            yield made
        finally:
            made.stop()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(headers=KEY) as session:
        yield session


async def eventually(check: Callable[[], Awaitable[bool]] | Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while True:
            found = check()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.02)


async def info(http: aiohttp.ClientSession, replica: Replica) -> wire.Info | None:
    try:
        async with http.get(replica.agent + "/info") as answer:
            return msgspec.json.decode(await answer.read(), type=wire.Info)
    except aiohttp.ClientError:
        return None


@pytest.fixture
async def ready(http: aiohttp.ClientSession, replica: Replica) -> wire.Info:
    async def check() -> bool:
        seen = await info(http, replica)
        return seen is not None and seen.state is wire.State.READY

    await eventually(check, 40)
    seen = await info(http, replica)
    assert seen is not None
    return seen


class Router:
    """A router's view of the replica, over one stream at a time."""

    def __init__(self, http: aiohttp.ClientSession, replica: Replica) -> None:
        self._http, self._replica = http, replica
        self.held: dict[int, int] = {}
        self.whole = False
        self.reasons: list[str] = []
        self.status: wire.Status | None = None
        self.load: wire.Load | None = None
        self.welcome: wire.Welcome | None = None

    async def run(self) -> None:
        while True:
            try:
                async with self._http.ws_connect(self._replica.agent + "/stream") as stream:
                    await stream.send_bytes(wire.encode(wire.Hello(router="test")))
                    welcome = wire.decode_from_agent(await stream.receive_bytes())
                    assert isinstance(welcome, wire.Welcome)
                    self.welcome = welcome
                    async for message in stream:
                        await self._apply(stream, wire.decode_from_agent(message.data))
            except aiohttp.ClientError:
                pass
            self.whole = False
            await asyncio.sleep(0.05)

    async def _apply(self, stream: aiohttp.ClientWebSocketResponse, message: wire.FromAgent) -> None:
        match message:
            case wire.SnapshotBegin():
                self.held, self.whole = {}, False
                self.reasons.append(message.reason)
            case wire.SnapshotEnd():
                self.whole = True
            case wire.Publish():
                self.held |= zip(wire.unpack_hashes(message.hashes), wire.unpack_depths(message.depths), strict=True)
            case wire.Retract():
                for gone in wire.unpack_hashes(message.hashes):
                    self.held.pop(gone, None)
            case wire.Load():
                self.load = message
            case wire.Status():
                self.status = message
                if message.state is wire.State.FENCED:
                    await stream.send_bytes(wire.encode(wire.FenceAck(epoch=message.epoch)))
            case _:
                pass

    def predict(self, body: dict[str, Any]) -> int:
        """Cached tokens expected, to whole blocks of 32."""
        assert self.welcome is not None
        request = canonical("/v1/chat/completions", body, template=self.welcome.template)
        assert request is not None
        return max((self.held.get(h, 0) for h in prefix_chain(request).hashes), default=0) // 32 * 32


@pytest.fixture
async def router(http: aiohttp.ClientSession, replica: Replica, ready: wire.Info) -> AsyncIterator[Router]:
    made = Router(http, replica)
    task = asyncio.create_task(made.run())
    await eventually(lambda: made.whole and made.status is not None)
    yield made
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def chat(question: str, system: str = SYSTEM, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"model": "m", "messages": messages, "max_tokens": 8, **more}


async def ask(http: aiohttp.ClientSession, replica: Replica, body: dict[str, Any]) -> dict[str, Any]:
    async with http.post(replica.engine + "/v1/chat/completions", json=body) as answer:
        assert answer.status == 200
        found: dict[str, Any] = await answer.json()
        return found


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_prediction_is_what_the_engine_then_reports(
    http: aiohttp.ClientSession, replica: Replica, router: Router
) -> None:
    await ask(http, replica, chat("first", "Alpha. " * 200))
    await eventually(lambda: router.predict(chat("second", "Alpha. " * 200)) > 0)
    predicted = router.predict(chat("second", "Alpha. " * 200))
    assert abs(predicted - cached(await ask(http, replica, chat("second", "Alpha. " * 200)))) <= 32
    assert router.predict(chat("first", "Beta. " * 200)) == 0


async def test_conversation_continues_where_its_reply_ended(
    http: aiohttp.ClientSession, replica: Replica, router: Router
) -> None:
    first = chat("What is cached? " * 20, "Gamma. " * 100, max_tokens=64)
    answer = await ask(http, replica, first)
    reply = answer["choices"][0]["message"]
    turn = {**first, "messages": [*first["messages"], reply, {"role": "user", "content": "and then?"}]}
    total = answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]
    await eventually(lambda: router.predict(turn) >= total - 64)
    assert abs(router.predict(turn) - cached(await ask(http, replica, turn))) <= 32


async def test_reset_of_an_idle_engines_cache_is_known_at_once(
    http: aiohttp.ClientSession, replica: Replica, router: Router
) -> None:
    body = chat("one", "Delta. " * 200)
    await ask(http, replica, body)
    await eventually(lambda: router.predict(body) > 0)
    async with http.post(replica.engine + "/reset_prefix_cache") as answer:
        assert answer.status == 200
    await eventually(lambda: router.predict(body) == 0 and not router.held, 2)


async def test_load_is_reported_while_a_request_runs(http: aiohttp.ClientSession, replica: Replica, router: Router) -> None:
    running = asyncio.create_task(ask(http, replica, chat("long", max_tokens=400)))
    await eventually(lambda: router.load is not None and router.load.inflight == 1)
    await running
    await eventually(lambda: router.load is not None and router.load.inflight == 0)
    assert router.load is not None
    assert router.load.prefill_backlog_tokens == 0


async def test_killed_agent_knows_again_what_it_knew_and_the_engine_never_noticed(
    http: aiohttp.ClientSession, replica: Replica, router: Router
) -> None:
    bodies = [chat(f"question {i}", f"Document {i}. " * 100) for i in range(10)]
    for body in bodies:
        await ask(http, replica, body)
    await eventually(lambda: all(router.predict(body) > 0 for body in bodies))
    before, predicted = replica.state, [router.predict(body) for body in bodies]
    assert before.agent.pid
    os.kill(before.agent.pid, signal.SIGKILL)
    served = await asyncio.gather(*(ask(http, replica, chat(f"meanwhile {i}")) for i in range(5)))
    assert len(served) == 5
    await eventually(lambda: replica.state.agent.pid != before.agent.pid)
    await eventually(lambda: router.whole and [router.predict(body) for body in bodies] == predicted, 10)
    await eventually(lambda: router.predict(chat("meanwhile 3")) > 0)
    assert replica.state.engine == before.engine


async def test_killed_engine_is_unknown_at_once_and_known_again_under_a_new_epoch(
    http: aiohttp.ClientSession, replica: Replica, router: Router
) -> None:
    body = chat("x", "Epsilon. " * 200)
    await ask(http, replica, body)
    await eventually(lambda: router.predict(body) > 0)
    before = replica.state.engine
    assert before.pid
    os.kill(before.pid, signal.SIGKILL)
    await eventually(lambda: router.status is not None and router.status.state is wire.State.STARTING, 2)
    await eventually(lambda: router.whole and not router.held, 2)
    await eventually(lambda: router.status is not None and router.status.state is wire.State.READY, 40)
    assert router.status is not None
    assert router.status.epoch == replica.state.engine.epoch > before.epoch
    await ask(http, replica, body)
    await eventually(lambda: router.predict(body) > 0)


async def test_drain_command_lets_the_stream_end_and_leaves_the_engine_to_sigterm(
    http: aiohttp.ClientSession, replica: Replica, router: Router
) -> None:
    await eventually(lambda: router.load is not None and router.load.inflight == 0)
    running = asyncio.create_task(ask(http, replica, chat("drained", max_tokens=200)))
    await eventually(lambda: router.load is not None and router.load.inflight == 1)
    env = {**os.environ, "PREFIXPOOL_WORKER_ENGINE_KEY_FILE": str(replica.run_dir.parent / "key")}
    command = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "prefixpool_agent.worker", "drain", "--agent-port", str(replica.agent_port)), env=env
    )
    assert await command.wait() == 0
    await eventually(running.done, 1)  # it waited for it
    assert running.result()["choices"][0]["finish_reason"] in ("stop", "length")
    assert router.status is not None
    assert router.status.state is wire.State.FENCED
    assert replica.state.engine.phase == "running"
    async with http.delete(replica.agent + "/drain") as answer:
        assert answer.status == 200
    await eventually(lambda: router.status is not None and router.status.state is wire.State.READY)


async def test_drain_lets_the_stream_end_refuses_new_ones_and_stops_the_engine(
    http: aiohttp.ClientSession, replica: Replica, router: Router
) -> None:
    await eventually(lambda: router.load is not None and router.load.inflight == 0)  # what earlier tests asked has ended
    running = asyncio.create_task(ask(http, replica, chat("long", max_tokens=300)))
    await eventually(lambda: router.load is not None and router.load.inflight == 1)
    async with http.post(replica.agent + "/drain", json={"timeout_s": 60}) as answer:
        assert answer.status == 202
    await eventually(lambda: router.status is not None and router.status.state is wire.State.FENCED, 2)
    async with http.post(replica.engine + "/v1/chat/completions", json=chat("new")) as answer:
        assert (answer.status, answer.headers["x-prefixpool-fenced"]) == (503, "1")
    assert (await running)["choices"][0]["finish_reason"] in ("stop", "length")
    async with http.post(replica.agent + "/drain", json={"wait": True}) as answer:
        status = msgspec.json.decode(await answer.read(), type=wire.DrainStatus)
    assert (status.phase, status.forced, status.reason) == (wire.DrainPhase.DONE, False, "all requests ended")
    await eventually(lambda: router.status is not None and router.status.state is wire.State.STOPPED, 2)
    assert replica.state.engine.phase == "stopped"
    async with http.get(replica.agent + "/readyz") as answer:
        assert answer.status == 503


def test_no_prompt_is_in_any_log(replica: Replica) -> None:
    logs = [path.read_text() for path in replica.run_dir.glob("*.log")]
    assert any("attached to the engine" in text for text in logs)
    assert not any("Epsilon" in text or "careful" in text for text in logs)
