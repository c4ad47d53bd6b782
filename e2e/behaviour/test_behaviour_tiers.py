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
from prefixpool_testing.sim_pool import PoolOptions, SimPool, salt_of, samples, started, text

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK = 32


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SimPool]:
    """Two replicas with host memory of their own and one directory on disk."""
    disk = (f"--disk-kv-dir={tmp_path_factory.mktemp('kv')}", f"--disk-kv-bytes={4 << 30}", "--disk-kv-shared=true")
    options = PoolOptions(worker_args=(f"--host-kv-bytes={256 << 20}", *disk))
    async with started(options, tmp_path_factory.mktemp("pool")) as running:
        yield running


async def test_what_one_replica_read_another_restores(pool: SimPool) -> None:
    said = text("read by one replica")
    first = await pool.client.chat(said)
    other = pool.another(first.replica)
    restored = await pool.engine(other).chat(said, cache_salt=salt_of("alpha"))
    assert restored.cached == whole(first)
    assert await told(pool, other, "tier_cached_tokens_total", "disk") == whole(first)


async def test_restarted_replicas_serve_from_disk_and_expect_even_what_was_read_last(pool: SimPool) -> None:
    said = [text(f"{i} of the last texts") for i in range(4)]
    for each in said:
        await pool.client.chat(each)
        await pool.settled()
    await restarted(pool)
    for each in said:
        again = await pool.client.chat(each)
        assert again.cached == whole(again)
        assert abs(again.predicted - again.cached) <= BLOCK


async def test_fill_and_stores_of_every_tier_are_told(pool: SimPool) -> None:
    first = await pool.client.chat(text("fills every tier"))
    for tier in ("device", "host", "disk"):
        assert 0 < await told(pool, first.replica, "tier_fill_ratio", tier) < 1
    for tier in ("host", "disk"):
        assert await told(pool, first.replica, "tier_stores_total", tier) >= first.prompt // BLOCK
        assert await told(pool, first.replica, "tier_used_bytes", tier) > 0


async def restarted(pool: SimPool) -> None:
    """All engines are killed and back, and their agents have read what is on disk."""
    for name in pool.names:
        pool.local.kill(name, "engine")
    for name in pool.names:
        await pool.knows_nothing_of(name)
    await pool.usable()
    for name in pool.names:
        await told_on_disk(pool, name)


def whole(reply: Reply) -> int:
    return (reply.prompt - 1) // BLOCK * BLOCK


async def told_on_disk(pool: SimPool, name: str) -> None:
    """Until an agent knows all texts that any knows, and routers what it told."""

    async def check() -> bool:
        infos = [await pool.info(each) for each in (name, *pool.names)]
        return infos[0].boundaries == max(info.boundaries for info in infos) > 0

    await eventually(check, what=f"{name} knows what is on disk")
    await eventually(lambda: heard(pool, name), what=f"routers know what {name} knows")


async def heard(pool: SimPool, name: str) -> bool:
    boundaries = (await pool.info(name)).boundaries
    return all(view.boundaries >= boundaries for view in await pool.views(name))


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
