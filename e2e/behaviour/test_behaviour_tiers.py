"""Tiers in a pool of sims that share a disk: what lies below the device is predicted, comes true, and is told in metrics.

Real vLLM keeps the same: e2e/engine/test_engine_spill_pool.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from prefixpool import names
from prefixpool_testing.eventually import eventually
from prefixpool_testing.pool_client import Reply
from prefixpool_testing.sim_pool import PoolOptions, SimPool, samples, started, text

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK = 32


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SimPool]:
    """Two replicas with host memory of their own and one directory on disk."""
    disk = (f"--disk-kv-dir={tmp_path_factory.mktemp('kv')}", f"--disk-kv-bytes={4 << 30}", "--disk-kv-shared=true")
    options = PoolOptions(worker_args=(f"--host-kv-bytes={256 << 20}", *disk))
    async with started(options, tmp_path_factory.mktemp("pool")) as running:
        yield running


async def test_what_one_replica_read_another_restores_and_routers_expect_it(pool: SimPool) -> None:
    said = text("read by one replica")
    first = await pool.client.chat(said)
    other = pool.another(first.replica)
    await told_on_disk(pool, other)
    pool.local.kill(first.replica, "engine")
    await pool.knows_nothing_of(first.replica)
    again = await pool.client.chat(said)
    assert (again.replica, again.cached) == (other, whole(again))
    assert abs(again.predicted - again.cached) <= BLOCK
    assert await told(pool, other, "tier_cached_tokens_total", "disk") == whole(again)
    await pool.usable()


async def test_restarted_replica_knows_at_once_what_is_on_disk(pool: SimPool) -> None:
    said = text("outlives both engines")
    await pool.client.chat(said)
    for name in pool.names:
        await told_on_disk(pool, name)
    for name in pool.names:
        pool.local.kill(name, "engine")
    for name in pool.names:
        await pool.knows_nothing_of(name)
    await pool.usable()
    for name in pool.names:
        await told_on_disk(pool, name)
    again = await pool.client.chat(said)
    assert again.cached == whole(again)
    assert abs(again.predicted - again.cached) <= BLOCK


async def test_fill_and_stores_of_every_tier_are_told(pool: SimPool) -> None:
    first = await pool.client.chat(text("fills every tier"))
    for tier in ("device", "host", "disk"):
        assert 0 < await told(pool, first.replica, "tier_fill_ratio", tier) < 1
    for tier in ("host", "disk"):
        assert await told(pool, first.replica, "tier_stores_total", tier) >= first.prompt // BLOCK
        assert await told(pool, first.replica, "tier_used_bytes", tier) > 0


def whole(reply: Reply) -> int:
    return (reply.prompt - 1) // BLOCK * BLOCK


async def told_on_disk(pool: SimPool, name: str) -> None:
    """Until an agent, whose engine is idle, has told routers of what it found on disk."""

    async def check() -> bool:
        await pool.settled()
        return (await pool.info(name)).resident_blocks > 0

    await eventually(check, what=f"{name} knows what is on disk")


async def told(pool: SimPool, name: str, metric: str, tier: str) -> float:
    """What an agent says, once it says anything but nothing: it reads the engine's figures every second."""
    found = 0.0

    async def check() -> bool:
        nonlocal found
        async with pool.http.get(pool.local.replicas[name].agent_url + names.PATH_METRICS) as answer:
            seen = samples(await answer.text())
        found = sum(s.value for s in seen if s.name == f"prefixpool_agent_{metric}" and s.labels == {"tier": tier})
        return found > 0

    await eventually(check, what=f"{metric} of {tier}")
    return found
