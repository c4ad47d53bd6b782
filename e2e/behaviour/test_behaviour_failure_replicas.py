"""Replicas that die, hang or leave while clients use the pool: the others serve on, and nothing hangs (peers.md 3.C)."""

from __future__ import annotations

import asyncio

import pytest

from prefixpool_testing.eventually import eventually
from prefixpool_testing.pool_client import CHAT, MESSAGES, chat
from prefixpool_testing.sim_pool import PoolOptions, SimPool, text
from prefixpool_testing.traffic import clients_of, streams, traffic

pytestmark = pytest.mark.asyncio(loop_scope="module")

POOL = PoolOptions(replicas=3, routers=2, device_blocks=2000, time_scale=0.1)
TOLD_S = 2.0  # promised: routers know the new state by then


async def unusable(pool: SimPool, name: str) -> None:
    """Until no router sends anything to this replica, within what is promised."""

    async def check() -> bool:
        return not any(view.usable for view in await pool.views(name))

    await eventually(check, within_s=TOLD_S, what=f"no router uses {name}")


async def test_killed_engine_ends_its_streams_and_nobody_elses(pool: SimPool) -> None:
    said = [text(f"{i} stream when an engine dies", 30) for i in range(18)]
    async with traffic(clients_of(pool)) as seen, streams(clients_of(pool), said, tokens=120) as running:
        victim = running[0].replica
        await seen.more(20)
        pool.local.kill(victim, "engine")
        await unusable(pool, victim)
        async with asyncio.timeout(30):
            await asyncio.gather(*(stream.rest() for stream in running))
        await seen.more(30)
    broken = [stream for stream in running if stream.replica == victim]
    whole = [stream for stream in running if stream.replica != victim]
    assert broken
    assert whole
    for stream in broken:
        assert [event["error"]["type"] for event in stream.errors] == ["server_error"]
        assert not stream.done
    for stream in whole:
        assert (stream.done, stream.errors) == (True, [])
    assert not seen.failures
    await pool.usable(victim)


async def test_affinity_to_a_dead_engine_is_dropped__peers_39(pool: SimPool) -> None:
    said = text("cached where an engine dies", 200)
    await pool.client.chat(said)
    await pool.settled()
    victim = (await pool.client.chat(said)).replica
    before = await pool.metric("prefixpool_router_retries_total")
    pool.local.kill(victim, "engine")
    for client in clients_of(pool) * 6:
        assert (await client.chat(said)).replica != victim
    tried = await pool.metric("prefixpool_router_retries_total") - before
    assert tried <= len(pool.local.routers), "each router may find out for itself, once"
    await pool.usable(victim)
    await pool.settled()
    assert (await pool.held(await pool.client.chat(said)))[victim] == 0


async def test_broken_stream_of_messages_ends_in_their_dialect(pool: SimPool) -> None:
    async with pool.client.stream(MESSAGES, chat(text("messages when an engine dies"), max_tokens=400)) as stream:
        await stream.begin()
        pool.local.kill(stream.replica, "engine")
        async with asyncio.timeout(30):
            await stream.rest()
    assert [event["error"]["type"] for event in stream.errors] == ["api_error"]
    assert not stream.done
    await pool.usable()


async def test_several_choices_are_not_replayed_once_they_began__peers_45(pool: SimPool) -> None:
    body = chat(text("three choices when an engine dies"), n=3, max_tokens=400, min_tokens=400, temperature=1, seed=1)
    async with pool.client.stream(CHAT, body) as stream:
        await stream.begin()
        pool.local.kill(stream.replica, "engine")
        async with asyncio.timeout(30):
            await stream.rest()
    assert len(stream.errors) == 1
    assert not stream.done
    await pool.usable()


async def test_whole_replica_that_dies_costs_no_request(pool: SimPool) -> None:
    """The last test of this pool: nobody starts a dead supervisor again."""
    name = pool.names[0]
    async with traffic(clients_of(pool)) as seen:
        await seen.more(40)
        pool.local.kill(name, "supervisor")
        await unusable(pool, name)
        await seen.more(30)
    assert not seen.failures
