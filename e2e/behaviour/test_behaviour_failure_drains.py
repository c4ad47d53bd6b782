"""Replicas and routers that leave in order, or in none, while clients use the pool: nothing is lost that need not be."""

from __future__ import annotations

import asyncio
import signal

import msgspec
import pytest

from prefixpool import wire
from prefixpool_testing.eventually import eventually
from prefixpool_testing.sim_pool import PoolOptions, SimPool, text
from prefixpool_testing.traffic import clients_of, streams, traffic

pytestmark = pytest.mark.asyncio(loop_scope="module")

POOL = PoolOptions(replicas=3, routers=2, device_blocks=2000, time_scale=0.1, router_args=("--drain-accept-s=1",))
TOKENS = 120


def texts(name: str, count: int = 18) -> list[str]:
    return [text(f"{i} {name}", 30) for i in range(count)]


async def test_fence_and_its_lifting_under_load_cost_no_request(pool: SimPool) -> None:
    async with traffic(clients_of(pool)) as seen, streams(clients_of(pool), texts("fenced"), tokens=TOKENS) as running:
        name = running[0].replica
        request = msgspec.json.encode(wire.DrainRequest(stop=False, wait=True))
        status = await pool.agent(name).post("/drain", request)
        assert msgspec.json.decode(status.body, type=wire.DrainStatus).phase is wire.DrainPhase.DONE
        await seen.each_lane()
        before = seen.served[name]
        await seen.more(30)
        assert seen.served[name] == before, "a fenced replica takes nothing"
        assert (await pool.agent(name).delete("/drain")).status == 200
        await pool.usable(name)
        await seen.more(30)
        await asyncio.gather(*(stream.rest() for stream in running))
    assert not seen.failures
    assert {(stream.done, len(stream.errors)) for stream in running} == {(True, 0)}


async def test_drain_of_one_of_three_under_load_costs_no_request(pool: SimPool) -> None:
    assert len(pool.names) == 3
    async with traffic(clients_of(pool)) as seen, streams(clients_of(pool), texts("drained"), tokens=TOKENS) as running:
        name = running[0].replica
        await pool.local.remove(name)
        assert name not in pool.names
        await seen.more(30)
        await asyncio.gather(*(stream.rest() for stream in running))
    assert not seen.failures
    assert {(stream.done, len(stream.errors)) for stream in running} == {(True, 0)}
    assert {len(stream.events) for stream in running} == {len(running[0].events)}


async def test_router_that_is_stopped_finishes_its_streams_and_clients_go_elsewhere(pool: SimPool) -> None:
    async with traffic(clients_of(pool)) as seen, streams(clients_of(pool), texts("router stops"), tokens=TOKENS) as running:
        pool.local.kill("router-0", "router", signal.SIGTERM)
        await seen.more(40)
        await asyncio.gather(*(stream.rest() for stream in running))
    assert not seen.failures
    assert {(stream.done, len(stream.errors)) for stream in running} == {(True, 0)}
    process = pool.local.routers[0].process
    assert process is not None
    assert await process.wait(20)
    assert process.returncode == 0
    await pool.local.start_router(0)


async def test_killed_router_takes_its_own_connections_with_it_and_no_more(pool: SimPool) -> None:
    async with traffic(clients_of(pool)) as seen, streams(clients_of(pool), texts("router dies"), tokens=TOKENS) as running:
        pool.local.kill("router-0", "router")
        await seen.more(40)
        async with asyncio.timeout(30):
            await asyncio.gather(*(stream.rest() for stream in running))
    assert not seen.failures
    assert seen.reconnects
    assert {(stream.done, stream.cut) for stream in running[0::2]} == {(False, True)}
    assert {(stream.done, stream.cut) for stream in running[1::2]} == {(True, False)}

    async def check() -> bool:
        return not any([(await pool.info(name)).inflight for name in pool.names])

    await eventually(check, what="engines are rid of what the dead router had sent")
    await pool.local.start_router(0)
    assert (await pool.client_of("alpha", 0).chat(text("after the router's return"))).status == 200
