"""A disk that is slower than computing: routers learn it from the agent, tell the engine not to read it, and expect so."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixpool_testing.eventually import eventually
from prefixpool_testing.pool_client import Reply
from prefixpool_testing.sim_pool import PoolOptions, SimPool, started, text

pytestmark = pytest.mark.asyncio

BLOCK = 32
SLOW_S = 0.02  # simulated, to read a token: many times what computing it takes
ROUNDS = 3  # of one load in 32 that is too dear is made all the same


async def test_a_prefix_on_a_slow_disk_is_computed_again_and_was_expected_to_be(tmp_path: Path) -> None:
    disk = (f"--disk-kv-dir={tmp_path / 'kv'}", f"--disk-kv-bytes={1 << 30}")
    options = PoolOptions(
        replicas=1, engine_args=f"--read-s-per-token {SLOW_S}", worker_args=(f"--host-kv-bytes={256 << 20}", *disk)
    )
    async with started(options, tmp_path) as pool:
        said = text("on a slow disk", 200)
        first = await pool.client.chat(said)
        loaded = await from_disk(pool, said)
        assert loaded.cached == whole(first), "nobody knows yet what that costs"
        await eventually(lambda: slow(pool), what="the router knows what it costs")
        told = 0
        for _ in range(ROUNDS):
            again = await from_disk(pool, said)
            tiers = (await pool.explain(again.request_id)).tiers
            assert abs(again.predicted - again.cached) <= BLOCK
            assert tiers.held_tokens >= whole(first)
            told += tiers.told == {"max_load_tokens": 0} and again.cached == 0
        assert told
        assert await pool.metric("prefixpool_router_refused_loads_total", tier="disk") == told


async def from_disk(pool: SimPool, said: str) -> Reply:
    """The same again, with nothing left but what is on disk."""
    (name,) = pool.names
    assert (await pool.engine(name).post("/reset_prefix_cache?reset_external=true", b"")).status == 200
    await pool.settled()
    return await pool.client.chat(said)


async def slow(pool: SimPool) -> bool:
    views = [view for name in pool.names for view in await pool.views(name)]
    return all(view.costs["disk_s_per_token"] > 0 for view in views)


def whole(reply: Reply) -> int:
    return (reply.prompt - 1) // BLOCK * BLOCK
