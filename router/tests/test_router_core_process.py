"""Whole router processes: admin port, drain, several workers, the command. Fake agents, tiny engines, real sockets."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from prefixpool.errors import SettingsError
from prefixpool.wire import State
from prefixpool_router import main as command
from prefixpool_router.drain import Draining, drain
from prefixpool_router.serve import Router
from prefixpool_router.settings import RouterSettings
from prefixpool_router.workers import HUNG_S, until_hung
from prefixpool_testing.fake_agent import FakeAgent
from prefixpool_testing.fake_endpoint_slices import NAMESPACE, SERVICE, FakeEndpointSlices, listening, slices_of

CHAT = {"model": "model", "messages": [{"role": "user", "content": "hello " * 500}]}


class Answer(NamedTuple):
    status: int
    body: Any
    headers: Any


class TinyEngine:
    """Answers chats, at once or when `gate` opens."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.requests = 0

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_post("/v1/chat/completions", self._chat)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _chat(self, request: web.Request) -> web.Response:
        self.requests += 1
        await request.read()
        await self.gate.wait()
        usage = {"prompt_tokens": 640, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
        message = {"role": "assistant", "content": "hi"}
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage})


class Pool:
    def __init__(self, engines: list[TinyEngine], agents: list[FakeAgent]) -> None:
        self.engines = engines
        self.agents = agents

    @property
    def flags(self) -> tuple[str, ...]:
        pairs = zip(self.agents, self.engines, strict=True)
        return tuple(part for agent, engine in pairs for part in (f"{agent.replica}={engine.url}", agent.url))


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    engines, agents = [TinyEngine(), TinyEngine()], [FakeAgent("p-0"), FakeAgent("p-1")]
    for part in (*engines, *agents):
        await part.start()
    yield Pool(engines, agents)
    for part in (*agents, *engines):
        await part.stop()


@asynccontextmanager
async def serving(pool: Pool, **settings: Any) -> AsyncIterator[tuple[Router, asyncio.Task[int]]]:
    router = Router(RouterSettings(replica=pool.flags, port=0, admin_port=0, drain_accept_s=0.05, **settings))
    task = asyncio.create_task(router.serve())
    try:
        await until(lambda: router.readiness().ready)
        yield router, task
    finally:
        router.draining.begin(hurry=True)
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event of its own)
            await asyncio.sleep(0.01)


async def get(http: aiohttp.ClientSession, port: int, path: str) -> Answer:
    async with http.get(f"http://127.0.0.1:{port}{path}") as answer:
        text = await answer.text()
        return Answer(answer.status, json.loads(text) if path[:5] != "/metr" else text, answer.headers)


async def health(http: aiohttp.ClientSession, router: Router) -> int:
    async with http.get(f"http://127.0.0.1:{router.edge.port}/health") as answer:
        assert await answer.read() == b""
        return answer.status


async def chat(http: aiohttp.ClientSession, port: int, **headers: str) -> Answer:
    async with http.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=CHAT, headers=headers) as answer:
        return Answer(answer.status, await answer.json(), answer.headers)


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


# -- one process


async def test_the_admin_port_tells_what_happened(pool: Pool, http: aiohttp.ClientSession) -> None:
    async with serving(pool) as (router, _):
        answer = await chat(http, router.edge.port, **{"x-request-id": "mine"})
        assert answer.status == 200
        assert (await get(http, router.admin_port, "/healthz")).status == 200
        async with http.get(f"http://127.0.0.1:{router.admin_port}/healthz") as alive:
            assert alive.headers.getall("Server") == ["prefixpool"]
        ready = await get(http, router.admin_port, "/readyz")
        assert (ready.status, ready.body) == (200, {"ready": True, "why": "2 of 2 replicas usable"})
        state = (await get(http, router.admin_port, "/state")).body["workers"][0]
        assert [(r["name"], r["mode"], r["usable"]) for r in state["replicas"]] == [
            ("p-0", "precise", True),
            ("p-1", "precise", True),
        ]
        (told,) = (await get(http, router.admin_port, "/explain?n=5&request_id=mine")).body["decisions"]
        assert told["replica"] == answer.headers["x-prefixpool-replica"]
        assert len(told["candidates"]) == 2
        assert told["outcome"]["status"] == 200
        metrics = (await get(http, router.admin_port, "/metrics")).body
        assert 'prefixpool_router_decisions_total{reason="cold"' in metrics
        assert "prefixpool_router_requests_total" in metrics


@pytest.mark.parametrize("n", ["x", "-1", "1e3", "9999999"])
async def test_a_wrong_count_is_refused(pool: Pool, http: aiohttp.ClientSession, n: str) -> None:
    async with serving(pool) as (router, _):
        assert (await get(http, router.admin_port, f"/explain?n={n}")).status == 400


async def test_the_admin_paths_are_not_beside_v1(pool: Pool, http: aiohttp.ClientSession) -> None:
    async with serving(pool) as (router, _):
        for path in ("/state", "/explain", "/metrics", "/readyz"):
            async with http.get(f"http://127.0.0.1:{router.edge.port}{path}") as answer:
                assert answer.status == 404


async def test_readiness_follows_the_members_and_says_why(pool: Pool, http: aiohttp.ClientSession) -> None:
    async with serving(pool) as (router, _):
        for agent in pool.agents:
            await agent.tell(State.FENCED, reason="draining")
        await until(lambda: not router.readiness().ready)
        answer = await get(http, router.admin_port, "/readyz")
        assert answer.status == 503
        assert answer.body["why"] == "no usable replica: p-0, p-1: engine is fenced: draining"
        assert await health(http, router) == 503
        refused = await chat(http, router.edge.port)
        assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
        await pool.agents[1].tell(State.READY)
        await until(lambda: router.readiness().ready)
        assert await health(http, router) == 200
        assert (await chat(http, router.edge.port)).headers["x-prefixpool-replica"] == "p-1"


async def test_a_router_without_replicas_is_not_ready_but_answers(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    members = tmp_path / "members.json"
    router = Router(RouterSettings(members=str(members), members_interval_s=0.02, port=0, admin_port=0))
    task = asyncio.create_task(router.serve())
    try:
        await until(lambda: router.admin_port != 0 and router.source.problem != "")
        answer = await get(http, router.admin_port, "/readyz")
        assert answer.status == 503
        assert "members are not known yet" in answer.body["why"]
        assert (await chat(http, router.edge.port)).status == 503
    finally:
        router.draining.begin(hurry=True)
        await task


async def test_a_drain_lets_running_answers_end(pool: Pool, http: aiohttp.ClientSession) -> None:
    async with serving(pool, drain_timeout_s=5.0) as (router, task):
        for engine in pool.engines:
            engine.gate.clear()
        running = asyncio.create_task(chat(http, router.edge.port))
        await until(lambda: any(engine.requests for engine in pool.engines))
        router.draining.begin()
        assert router.readiness() == (False, "draining")
        during = asyncio.create_task(chat(http, router.edge.port))  # still accepted
        await until(lambda: sum(engine.requests for engine in pool.engines) == 2)
        await asyncio.sleep(0.1)
        assert not task.done()
        for engine in pool.engines:
            engine.gate.set()
        assert (await running).status == 200
        answer = await during
        assert (answer.status, answer.headers["Connection"]) == (200, "close")
        assert await task == 0
        with pytest.raises(aiohttp.ClientConnectorError):
            await chat(http, router.edge.port)


async def test_a_drain_ends_at_its_deadline(pool: Pool, http: aiohttp.ClientSession) -> None:
    async with serving(pool, drain_timeout_s=0.1) as (router, task):
        for engine in pool.engines:
            engine.gate.clear()
        running = asyncio.create_task(chat(http, router.edge.port))
        await until(lambda: any(engine.requests for engine in pool.engines))
        router.draining.begin(hurry=True)
        assert await asyncio.wait_for(task, 5) == 1
        with pytest.raises(aiohttp.ClientError):
            await running
        for engine in pool.engines:
            engine.gate.set()
        assert {replica.load.own for replica in router.fleet.replicas.values()} == {0}


async def test_a_taken_port_is_an_os_error(pool: Pool) -> None:
    async with serving(pool) as (router, _):
        second = Router(RouterSettings(replica=pool.flags, port=router.edge.port, admin_port=0))
        with pytest.raises(OSError, match=r"127.0.0.1:\d+: Address already in use"):
            await second.serve()


async def test_a_defect_in_the_fleets_tasks_ends_the_process(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(pool) as (router, task):

        def fail(late_s: float) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(router.fleet, "tick", fail)
        with pytest.raises(ExceptionGroup):
            await asyncio.wait_for(asyncio.shield(task), 5)


async def test_accepting_lasts_until_everyone_has_noticed_or_someone_hurries() -> None:
    class Server:
        steps: list[str]

        def begin_drain(self) -> None:
            self.steps.append("drain")

        async def stop(self, timeout_s: float) -> int:
            self.steps.append(f"stop {timeout_s:g}")
            return 0

    server, draining = Server(), Draining()
    server.steps = []
    draining.begin()
    task = asyncio.create_task(drain(server, draining, accept_s=60, timeout_s=7))
    await asyncio.sleep(0.02)
    assert server.steps == ["drain"]
    draining.begin(hurry=True)
    await asyncio.wait_for(task, 1)
    assert server.steps == ["drain", "stop 7"]


# -- settings and the command


@pytest.mark.parametrize(
    "settings",
    [RouterSettings(), RouterSettings(members="x.json", replica=("a=http://h:1",)), RouterSettings(replica=("a=b",))],
)
def test_settings_that_cannot_work_are_refused(settings: RouterSettings) -> None:
    with pytest.raises(SettingsError):
        Router(settings)


def test_an_unknown_policy_is_refused_at_start() -> None:
    with pytest.raises(SettingsError, match="accepted: prefix"):
        Router(RouterSettings(replica=("a=http://h:1",), policy="psychic"))


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        command.main(["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    for part in ("members.json", "--replica", "/explain", "PREFIXPOOL_ROUTER_POLICY", "SIGTERM drains"):
        assert part in text


def test_wrong_settings_exit_2_and_say_which(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--workers", "0", "--replica", "a=http://h:1"]) == 2
    assert "--workers" in capsys.readouterr().err


# -- several workers


class Running(NamedTuple):
    process: asyncio.subprocess.Process
    port: int
    admin_port: int
    log: asyncio.Task[bytes]  # what it writes from now on


def replicas_of(pool: Pool) -> list[str]:
    return [part for flag in _paired(pool.flags) for part in ("--replica", flag)]


@asynccontextmanager
async def command_running(*flags: str, **env: str) -> AsyncIterator[Running]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "prefixpool_router.main", "--port", "0", "--admin-port", "0", "--log-format", "json", *flags),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **env},
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(20):
            while True:
                line = json.loads(await process.stderr.readline())
                if line["message"] == "serving" and "admin_port" in line and line["admin_port"]:
                    break
        drained = asyncio.create_task(process.stderr.read())
        yield Running(process, line["port"], line["admin_port"], drained)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await drained


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _paired(flags: tuple[str, ...]) -> list[str]:
    return [",".join(flags[i : i + 2]) for i in range(0, len(flags), 2)]


async def state_of(http: aiohttp.ClientSession, running: Running) -> list[dict[str, Any]]:
    workers: list[dict[str, Any]] = (await get(http, running.admin_port, "/state")).body["workers"]
    return workers


async def until_ready(http: aiohttp.ClientSession, running: Running) -> None:
    async with asyncio.timeout(20):
        while (await get(http, running.admin_port, "/readyz")).status != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def all_ready(http: aiohttp.ClientSession, running: Running, workers: int = 2) -> list[dict[str, Any]]:
    async with asyncio.timeout(20):
        while True:
            state = await state_of(http, running)
            if len(state) == workers and all(worker["ready"] for worker in state):
                return state
            await asyncio.sleep(0.05)


async def test_workers_share_a_port_and_tell_as_one(pool: Pool) -> None:
    flags = ("--workers", "2", "--drain-accept-s", "0.1")
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
        async with command_running(*replicas_of(pool), *flags) as running:
            await until_ready(http, running)
            before = await state_of(http, running)  # ready is: all of them
            assert [worker["worker"] for worker in before] == [0, 1]
            answers = [await chat(http, running.port) for _ in range(30)]
            assert {answer.status for answer in answers} == {200}
            decisions = (await get(http, running.admin_port, "/explain?n=100")).body["decisions"]
            assert len(decisions) == 30
            assert {decision["worker"] for decision in decisions} == {0, 1}
            assert [d["at"] for d in decisions] == sorted((d["at"] for d in decisions), reverse=True)
            assert await requests_by_worker(http, running) == 30

            os.kill(before[0]["pid"], signal.SIGKILL)  # one dies: the other serves on, it comes back
            await until(lambda: not alive(before[0]["pid"]))
            after = [await chat(http, running.port) for _ in range(10)]
            assert {answer.status for answer in after} <= {200}
            await until_restarted(http, running, before[0]["pid"])

            running.process.terminate()
            assert await asyncio.wait_for(running.process.wait(), 15) == 0
        assert not any(alive(worker["pid"]) for worker in before)


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_all_workers_write_to_one_access_log(pool: Pool, workers: str) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
        flags = ("--workers", workers, "--drain-accept-s", "0")
        async with command_running(*replicas_of(pool), *flags, PREFIXPOOL_ROUTER_ACCESS_LOG="true") as running:
            await until_ready(http, running)
            ids = {f"r{i}" for i in range(20)}
            for one in ids:
                assert (await chat(http, running.port, **{"x-request-id": one})).status == 200
            async with http.get(f"http://127.0.0.1:{running.port}/nowhere") as answer:
                assert answer.status == 404
            running.process.terminate()
            assert await asyncio.wait_for(running.process.wait(), 15) == 0
            written = [json.loads(line) for line in (await running.log).splitlines()]
    told = [line for line in written if line["message"] == "request"]
    assert {line["request_id"] for line in told if line["ended"] == "complete"} == ids
    assert {(line["prompt_tokens"], line["path"]) for line in told if "replica" in line} == {(640, "/v1/chat/completions")}
    assert [line["path"] for line in told if line["ended"] == "refused"] == ["/nowhere"]


async def test_every_worker_follows_the_endpoint_slices_by_itself(pool: Pool, http: aiohttp.ClientSession) -> None:
    urls = {agent.replica: (engine.url, agent.url) for agent, engine in zip(pool.agents, pool.engines, strict=True)}
    api = FakeEndpointSlices()
    await api.put(*slices_of(urls))
    async with listening(api):
        found = ("--kubernetes-url", api.url, "--kubernetes-namespace", NAMESPACE, "--kubernetes-service", SERVICE)
        async with command_running(*found, "--workers", "2") as running:
            await until_ready(http, running)
            await api.put(*slices_of(urls, frozenset({"p-0"})))
            async with asyncio.timeout(20):
                while await usable(http, running) != [["p-1"], ["p-1"]]:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)


async def usable(http: aiohttp.ClientSession, running: Running) -> list[list[str]]:
    """By worker."""
    state = await state_of(http, running)
    return [[replica["name"] for replica in worker["replicas"] if replica["usable"]] for worker in state]


async def requests_by_worker(http: aiohttp.ClientSession, running: Running) -> float:
    text = (await get(http, running.admin_port, "/metrics")).body
    total = 0.0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "prefixpool_router_decisions_total":
                assert sample.labels["worker"] in ("0", "1")
                total += sample.value
    return total


async def until_restarted(http: aiohttp.ClientSession, running: Running, old_pid: int) -> None:
    async with asyncio.timeout(20):
        while old_pid in [worker["pid"] for worker in await all_ready(http, running)]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert 'worker_restarts_total{worker="0"} 1.0' in (await get(http, running.admin_port, "/metrics")).body


async def test_workers_do_not_outlive_a_killed_parent(pool: Pool, http: aiohttp.ClientSession) -> None:
    async with command_running(*replicas_of(pool), "--workers", "2") as running:
        pids = [worker["pid"] for worker in await all_ready(http, running)]
        running.process.kill()
        await running.process.wait()
        await until(lambda: not any(alive(pid) for pid in pids))


async def test_a_killed_parent_left_its_directory_behind(pool: Pool, http: aiohttp.ClientSession, tmp_path: Path) -> None:
    flags = (*replicas_of(pool), "--workers", "2")
    async with command_running(*flags, TMPDIR=str(tmp_path)) as running:
        (left,) = os.listdir(tmp_path)
        running.process.kill()
        await running.process.wait()
    async with command_running(*flags, TMPDIR=str(tmp_path)) as running:
        assert left not in os.listdir(tmp_path)
        running.process.terminate()
        await asyncio.wait_for(running.process.wait(), 15)
    assert os.listdir(tmp_path) == []


@pytest.mark.looptime
async def test_a_worker_that_hung_was_given_connections_for_ever() -> None:
    loop = asyncio.get_running_loop()

    async def answers() -> bool:
        lives = loop.time() < 100
        await asyncio.sleep(0 if lives else 2)
        return lives

    await until_hung(answers)
    assert 95 + HUNG_S <= loop.time() < 110 + HUNG_S  # behind the last answer, which was up to 5 s before


async def test_one_process_drains_on_sigterm(pool: Pool, http: aiohttp.ClientSession) -> None:
    async with command_running(*replicas_of(pool), "--drain-accept-s", "0.05") as running:
        await all_ready(http, running, 1)
        running.process.terminate()
        assert await asyncio.wait_for(running.process.wait(), 10) == 0
