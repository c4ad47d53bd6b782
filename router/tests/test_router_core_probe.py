"""Health probes of replicas that no agent speaks for. The answers are scripted; nothing waits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from prometheus_client import CollectorRegistry

from prefixpool_router import probe
from prefixpool_router.fleet import Fleet, FleetSettings
from prefixpool_router.knowledge import Knowledge
from prefixpool_router.membership import Member
from prefixpool_router.metrics import RoutingMetrics
from prefixpool_router.probe import Prober
from prefixpool_router.reach import KEY_REFUSED
from prefixpool_router.replica import Replica
from prefixpool_router.settings import RouterSettings
from prefixpool_testing.eventually import eventually
from prefixpool_testing.router_here import router_here

SILENT = probe._SILENT


class Scripted(Prober):
    """Its engines say what the test wants."""

    def __init__(self, fleet: Fleet, http: aiohttp.ClientSession) -> None:
        super().__init__(fleet, http, lambda: "", 1.0)
        self.says = ""

    async def ask(self, engine: str, *, key_doubted: bool = False) -> str:
        return self.says

    async def turn(self, replica: Replica, says: str) -> bool:
        """Whether the replica is usable after a probe."""
        self.says = says
        await self._probe(replica)
        return self._fleet.verdict(replica.name).usable


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(Knowledge(1 << 20), RoutingMetrics(CollectorRegistry()), FleetSettings(), lambda: 100.0)


def joined(fleet: Fleet, agent: str | None) -> Replica:
    fleet.apply([Member(name="a", engine="http://a:1", agent=agent)])
    return fleet.replicas["a"]


async def test_one_missed_probe_took_a_busy_plain_backend_out(fleet: Fleet) -> None:
    async with aiohttp.ClientSession() as http:
        prober, replica = Scripted(fleet, http), joined(fleet, None)
        assert await prober.turn(replica, "")
        assert await prober.turn(replica, SILENT)
        assert prober._is_due(replica), "it is asked again soon"
        assert await prober.turn(replica, "")
        assert await prober.turn(replica, SILENT), "an answer between two misses forgives the first"
        assert not await prober.turn(replica, SILENT)
        assert await prober.turn(replica, "")


@pytest.mark.parametrize(("agent", "says"), [(None, "no connection: refused"), ("http://a:2", SILENT)])
async def test_what_is_certain_counts_at_once(fleet: Fleet, agent: str | None, says: str) -> None:
    async with aiohttp.ClientSession() as http:
        prober, replica = Scripted(fleet, http), joined(fleet, agent)
        assert await prober.turn(replica, "")
        assert not await prober.turn(replica, says)


@asynccontextmanager
async def guarded(*, health: int = 200) -> AsyncIterator[str]:
    """An engine as vLLM with --api-key: all below /v1 wants it, /health does not."""

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/health":
            return web.Response(status=health)
        known = request.headers.get("Authorization") == "Bearer right"
        return web.json_response({"object": "list"} if known else {"error": "no"}, status=200 if known else 401)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


@pytest.mark.parametrize(
    ("key", "health", "doubted", "says"),
    [
        ("wrong", 200, False, ""),
        ("wrong", 200, True, KEY_REFUSED),
        ("wrong", 401, False, KEY_REFUSED),
        ("wrong", 404, False, KEY_REFUSED),
        ("wrong", 503, True, "/health answers 503"),
        ("right", 200, True, ""),
        ("right", 401, False, ""),  # its health is for others
    ],
)
async def test_what_a_probe_says_of_the_key(fleet: Fleet, key: str, health: int, doubted: bool, says: str) -> None:
    async with aiohttp.ClientSession() as http, guarded(health=health) as engine:
        prober = Prober(fleet, http, lambda: key, 1.0)
        assert await prober.ask(engine, key_doubted=doubted) == says


async def test_a_doubted_key_is_asked_about_soon_whoever_speaks_for_the_engine(fleet: Fleet) -> None:
    async with aiohttp.ClientSession() as http:
        prober, replica = Scripted(fleet, http), joined(fleet, None)
        assert await prober.turn(replica, "")
        prober._turn = 1
        assert not prober._is_due(replica)
        replica.reach.doubt_key()
        assert prober._is_due(replica)
        assert not await prober.turn(replica, KEY_REFUSED)
        assert prober._is_due(replica)
        assert await prober.turn(replica, "")
        assert not prober._is_due(replica)


async def test_a_key_that_did_not_fit_was_passed_off_as_the_clients(tmp_path: Path) -> None:
    """Until it fits, which needs no restart."""
    key = tmp_path / "engine.key"
    key.write_text("wrong")
    async with guarded() as engine, aiohttp.ClientSession() as client:
        settings = RouterSettings(
            replica=(f"a={engine}",),
            engine_key_file=str(key),
            port=0,
            admin_port=0,
            files_interval_s=0.02,
            probe_interval_s=0.02,
            drain_accept_s=0.0,
        )
        async with router_here(settings) as router:

            async def answers(status: int) -> bool:
                async with client.get(f"http://127.0.0.1:{router.edge.port}/v1/models") as answer:
                    told: Any = await answer.json()
                    return answer.status == status and (status == 200 or told["error"]["code"] == "engine_key_refused")

            assert await eventually(lambda: answers(502), what="the first request is answered")
            await eventually(lambda: _same(router.readiness().why, f"no usable replica: a: {KEY_REFUSED}"), what="it is out")
            assert await answers(502)
            key.write_text("right, for it was replaced".partition(",")[0])
            await eventually(lambda: answers(200), what="the new key is used")


async def _same(found: str, expected: str) -> bool:
    return found == expected
