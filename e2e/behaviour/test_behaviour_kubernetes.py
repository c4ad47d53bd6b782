"""A pool whose router learns of its replicas from EndpointSlices: pods come, end and go under load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from prefixpool_router.serve import Router
from prefixpool_router.settings import RouterSettings
from prefixpool_testing.eventually import eventually
from prefixpool_testing.fake_endpoint_slices import NAMESPACE, SERVICE, FakeEndpointSlices, Object, listening, slices_of
from prefixpool_testing.pool_client import CHAT, MESSAGES, PoolClient, chat
from prefixpool_testing.router_here import router_here
from prefixpool_testing.sim_pool import MODEL, PoolOptions, SimPool, text
from prefixpool_testing.traffic import streams, traffic

pytestmark = pytest.mark.asyncio(loop_scope="module")

POOL = PoolOptions(replicas=2, device_blocks=2000, time_scale=0.1)
FENCED_S = 2.0  # promised: from the API's word until nothing new is sent
TOKENS = 120


def pods(pool: SimPool, *terminating: str) -> list[Object]:
    urls = {name: (replica.engine_url, replica.agent_url) for name, replica in pool.local.replicas.items()}
    return slices_of(urls, frozenset(terminating))


@asynccontextmanager
async def discovering(pool: SimPool, api: FakeEndpointSlices, folder: Path, **settings: Any) -> AsyncIterator[Router]:
    key = folder / "engine.key"
    key.write_text(pool.local.engine_key)
    where: dict[str, Any] = {"kubernetes_url": api.url, "kubernetes_namespace": NAMESPACE, "kubernetes_service": SERVICE}
    ours = RouterSettings(port=0, admin_port=0, engine_key_file=str(key), served_models=(MODEL,), **where, **settings)
    async with router_here(ours) as router:
        yield router


async def usable(router: Router, *names: str, within_s: float = 20.0) -> None:
    async def check() -> bool:
        return {candidate.name for candidate in router.fleet.candidates} == set(names)

    await eventually(check, within_s=within_s, what=f"{names} usable")


def client_of(router: Router, http: aiohttp.ClientSession) -> PoolClient:
    return PoolClient(http, f"http://127.0.0.1:{router.edge.port}", "", MODEL)


async def test_a_terminating_pod_under_load_costs_no_request(pool: SimPool, tmp_path: Path) -> None:
    api = FakeEndpointSlices()
    await api.put(*pods(pool))
    async with listening(api), discovering(pool, api, tmp_path) as router:
        await usable(router, *pool.names)
        clients = [client_of(router, pool.http)]
        said = [text(f"{i} terminating", 30) for i in range(12)]
        async with traffic(clients) as seen, streams(clients, said, tokens=TOKENS) as running:
            leaving = running[0].replica
            staying = pool.another(leaving)
            await api.put(*pods(pool, leaving))
            await usable(router, staying, within_s=FENCED_S)
            await seen.each_lane()
            before = seen.served[leaving]
            await seen.more(30)
            assert seen.served[leaving] == before, "nothing new for a pod that ends"
            await asyncio.gather(*(stream.rest() for stream in running))
            await api.delete(leaving)
            await seen.more(10)
            await api.put(*pods(pool))  # its successor, of the same name
            await usable(router, *pool.names)
            await seen.more(10)
    assert not seen.failures
    assert {(stream.done, len(stream.errors)) for stream in running} == {(True, 0)}


async def test_an_api_server_that_is_away_costs_no_request(pool: SimPool, tmp_path: Path) -> None:
    api = FakeEndpointSlices()
    await api.put(*pods(pool))
    async with listening(api), discovering(pool, api, tmp_path) as router:
        await usable(router, *pool.names)
        async with traffic([client_of(router, pool.http)]) as seen:
            await api.stop()

            async def told() -> bool:
                return "no connection to" in router.report().members_problem

            await eventually(told, what="the state says that the API server is away")
            assert router.registry.get_sample_value("prefixpool_router_members_problem") == 1
            await seen.more(30)
            assert router.readiness().ready
            await api.start()

            async def well() -> bool:
                return not router.report().members_problem

            await eventually(well, what="the problem is over")
            await seen.more(10)
        assert not seen.failures
        assert router.registry.get_sample_value("prefixpool_router_members_problem") == 0


async def test_a_pool_scaled_to_nothing_answers_503_until_a_replica_is_there(pool: SimPool, tmp_path: Path) -> None:
    api = FakeEndpointSlices()
    alone = {"ready_without_replicas": True, "warmup_s": 0.1}
    async with listening(api), discovering(pool, api, tmp_path, **alone) as router:

        async def ready() -> bool:
            return router.readiness().ready

        await eventually(ready, what="a router without replicas is ready")
        client = client_of(router, pool.http)
        for path, shape in ((CHAT, "server_error"), (MESSAGES, "overloaded_error")):
            reply = await client.post(path, chat("hello"))
            assert (reply.status, reply.headers["retry-after"]) == (503, "10")
            assert reply.json()["error"]["type"] == shape
        assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == [MODEL]
        assert (await client.post(CHAT, {**chat("hello"), "model": "other"})).status == 404
        await api.put(*pods(pool))
        await usable(router, *pool.names)
        await client.chat("hello")
