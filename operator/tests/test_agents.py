"""Asking agents over real HTTP: those that answer are told of, the others left out."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from prefixpool_operator.agents import HttpAgents, answers
from prefixpool_operator.identity import L_COMPONENT
from prefixpool_operator.observed import Raw
from prefixpool_testing.agent_info import info

INFO = info("p-0", engine="sim", models=("m",), device_blocks=100, device_tokens=1600)


def pod(name: str, *, component: str = "worker", address: str = "127.0.0.1", state: str = "running") -> Raw:
    status: Raw = {"containerStatuses": [{"name": "worker", "state": {state: {}}}]}
    return {
        "metadata": {"name": name, "labels": {L_COMPONENT: component}},
        "status": {**status, **({"podIP": address} if address else {})},
    }


@pytest.mark.parametrize(
    ("asked", "candidate"),
    [
        (True, pod("p-0")),
        (False, pod("p-0", component="router")),
        (False, pod("p-0", address="")),
        (False, pod("p-0", state="waiting")),
        (False, {"metadata": {"name": "p-0"}}),
    ],
)
def test_only_workers_that_run_are_asked(asked: bool, candidate: Raw) -> None:
    assert answers(candidate) is asked


async def test_an_agent_is_asked_with_the_pools_key() -> None:
    keys: list[str | None] = []

    async def info(request: web.Request) -> web.Response:
        keys.append(request.headers.get("Authorization"))
        return web.Response(body=msgspec.json.encode(INFO))

    app = web.Application()
    app.add_routes([web.get("/info", info)])
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        infos = await HttpAgents(session, timeout_s=5, port=server.port or 0).infos([pod("p-0")], "sesame")
    assert infos == {"p-0": INFO}
    assert keys == ["Bearer sesame"]


async def test_an_answer_that_comes_in_pieces_is_read_to_its_end() -> None:
    first_half_read = asyncio.Event()
    text = msgspec.json.encode(INFO)

    async def heard(*_: object) -> None:
        first_half_read.set()

    async def info(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(text[:100])
        await first_half_read.wait()
        await answer.write(text[100:])
        return answer

    app = web.Application()
    app.add_routes([web.get("/info", info)])
    tracing = aiohttp.TraceConfig()
    tracing.on_request_end.append(heard)
    async with TestServer(app) as server, aiohttp.ClientSession(trace_configs=[tracing]) as session:
        infos = await HttpAgents(session, timeout_s=5, port=server.port or 0).infos([pod("p-0")], "k")
    assert infos == {"p-0": INFO}


async def test_an_answer_without_end_is_cut() -> None:
    async def info(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(b" " * (1 << 16))

    app = web.Application()
    app.add_routes([web.get("/info", info)])
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        assert await HttpAgents(session, timeout_s=60, port=server.port or 0).infos([pod("p-0")], "k") == {}


async def test_an_agent_that_refuses_talks_nonsense_or_is_not_there_is_left_out() -> None:
    answers_by_turn: list[Any] = [web.Response(status=401), web.Response(text="<html>"), web.Response(text="{}")]

    async def info(_request: web.Request) -> web.Response:
        answer: web.Response = answers_by_turn.pop()
        return answer

    app = web.Application()
    app.add_routes([web.get("/info", info)])
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        agents = HttpAgents(session, timeout_s=5, port=server.port or 0)
        assert await agents.infos([pod("p-0"), pod("p-1"), pod("p-2")], "k") == {}
        await server.close()
        assert await agents.infos([pod("p-0"), pod("p-1", address="::1")], "k") == {}
    assert answers_by_turn == []


async def test_an_agent_that_never_answers_holds_up_nobody_for_long() -> None:
    release = asyncio.Event()

    async def info(_request: web.Request) -> web.Response:
        await release.wait()
        return web.Response()

    app = web.Application()
    app.add_routes([web.get("/info", info)])
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        assert await HttpAgents(session, timeout_s=0.05, port=server.port or 0).infos([pod("p-0")], "k") == {}
        release.set()


async def test_an_agent_sends_the_operator_nowhere_else() -> None:
    """Who runs a pod could have had any address asked that only the operator reaches."""
    asked: list[str] = []

    async def anything(request: web.Request) -> web.Response:
        asked.append(request.path)
        raise web.HTTPFound("/elsewhere")

    app = web.Application()
    app.add_routes([web.get("/{path:.*}", anything)])
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        assert await HttpAgents(session, timeout_s=5, port=server.port or 0).infos([pod("p-0")], "sesame") == {}
    assert asked == ["/info"]


class Deaf:
    """A network that swallows what is sent."""

    def get(self, _url: str, **_how: Any) -> Deaf:
        return self

    async def __aenter__(self) -> None:
        await asyncio.sleep(2)
        raise TimeoutError

    async def __aexit__(self, *_error: object) -> None:
        pass


@pytest.mark.looptime(start=0)
async def test_agents_that_cannot_be_reached_leave_time_to_look_after_their_pools() -> None:
    """Thousands of them, one timeout after another, took longer than a look at a pool may: none was looked after."""
    session: Any = Deaf()
    agents = HttpAgents(session, timeout_s=2)
    pools = [[pod(f"p{pool}-{number}") for number in range(500)] for pool in range(8)]
    assert await asyncio.gather(*(agents.infos(pods, "sesame") for pods in pools)) == [{}] * 8
    assert asyncio.get_running_loop().time() <= 12
