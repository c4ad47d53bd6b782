"""Clients that leave, by the ten thousands: no count, no place and no memory stays behind (peers.md 30, 34)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from random import Random

import pytest

from prefixpool_testing.eventually import eventually
from prefixpool_testing.pool_client import CHAT, chat
from prefixpool_testing.sim_pool import PoolOptions, SimPool, text
from prefixpool_testing.traffic import clients_of

POOL = PoolOptions(replicas=2, routers=2, device_blocks=3000, time_scale=0.05)
LANES = 50
GROWTH_BYTES = 16 << 20


async def memory(pool: SimPool) -> int:
    """Resident bytes of all routers together."""
    reports = await pool.routers()
    return sum(int(Path(f"/proc/{report.pid}/statm").read_text().split()[1]) * 4096 for report in reports)


async def idle(pool: SimPool) -> bool:
    infos = [await pool.info(name) for name in pool.names]
    views = [view for name in pool.names for view in await pool.views(name)]
    left = [(info.inflight, info.running, info.waiting) for info in infos]
    left += [(view.inflight, view.own_inflight, view.pending_tokens) for view in views]
    return not any(map(any, left)) and not await pool.metric("prefixpool_router_open_requests")


@pytest.mark.timeout(3600)
async def test_aborts_leave_nothing(pool: SimPool, soak_s: float) -> None:
    draw, asked = Random(30), 0

    async def lane(number: int, ends_s: float) -> None:
        nonlocal asked
        client = clients_of(pool)[number % 2]
        while time.monotonic() < ends_s:
            asked += 1
            body = chat(text(f"aborted {asked % 200}", 60), max_tokens=30, min_tokens=30, stream=asked % 2 == 0)
            try:
                async with asyncio.timeout(draw.choice((0.002, 0.02, 0.1, 0.3)) * draw.random()):
                    await client.post(CHAT, body)
            except TimeoutError:
                continue

    async def for_s(seconds: float) -> None:
        ends_s = time.monotonic() + seconds
        await asyncio.gather(*(lane(number, ends_s) for number in range(LANES)))
        await eventually(lambda: idle(pool), what="nothing under way")

    await for_s(soak_s / 5)
    before = await memory(pool)
    await for_s(soak_s)
    grown = await memory(pool) - before
    print(f"{asked} requests, most of them aborted; routers grew by {grown / 2**20:.1f} MiB")
    assert grown < GROWTH_BYTES
