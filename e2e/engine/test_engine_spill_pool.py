"""Tiers in a pool, on real vLLM: what lies below the device is predicted, and comes true."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from prefixpool_cli.pool_spec import PoolSpec
from prefixpool_testing.eventually import eventually
from prefixpool_testing.pool_client import Reply
from prefixpool_testing.sim_pool import SimPool, running, text

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

BLOCK = 32
STARTS_S = 600.0  # an engine, on a busy machine
SOON_S = 30.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(model: str, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SimPool]:
    """One replica with host memory and disk."""
    tiers = (f"--host-kv-bytes={256 << 20}", f"--disk-kv-dir={folder}", f"--disk-kv-bytes={4 << 30}")
    spec = PoolSpec(
        model=model, replicas=1, block_tokens=BLOCK, device_blocks=129, max_model_len=2048, dev_mode=True, worker_args=tiers
    )
    async with running(spec, tmp_path_factory.mktemp("pool")) as started:
        yield started


def whole(reply: Reply) -> int:
    return (reply.prompt - 1) // BLOCK * BLOCK


async def test_what_is_in_host_memory_is_predicted_and_restored(pool: SimPool) -> None:
    said = text("in host memory", 300)
    first = await pool.client.chat(said)
    await pool.settled()
    assert (await pool.engine(first.replica).post("/reset_prefix_cache", b"")).status == 200
    await eventually(lambda: resident(pool, first.replica), within_s=SOON_S, what="its picture is that of host memory")
    again = await pool.client.chat(said)
    assert again.cached == whole(again)
    assert abs(again.predicted - again.cached) <= BLOCK


async def test_restarted_engine_serves_an_old_prefix_from_disk_and_was_expected_to(pool: SimPool, folder: Path) -> None:
    said = text("read before the engine died", 300)
    first = await pool.client.chat(said)
    await eventually(lambda: written(folder, first.prompt // BLOCK), within_s=SOON_S, what="its chunks are on disk")
    await pool.settled()
    pool.local.kill(first.replica, "engine")
    await pool.knows_nothing_of(first.replica, within_s=SOON_S)
    await pool.usable(first.replica, within_s=STARTS_S)
    await eventually(lambda: resident(pool, first.replica), within_s=SOON_S, what="the agent has read what is on disk")
    again = await pool.client.chat(said)
    assert again.cached == whole(again)
    assert abs(again.predicted - again.cached) <= BLOCK


async def resident(pool: SimPool, name: str) -> bool:
    """Some blocks are, and routers have been told."""
    known = (await pool.info(name)).resident_blocks > 0
    await pool.settled()
    return known


async def written(folder: Path, chunks: int) -> bool:
    return len(list(folder.rglob("*.kv"))) >= chunks
