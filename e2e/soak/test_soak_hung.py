"""An engine whose process hangs, with the deadlines that users have: nobody waits for it for long."""

from __future__ import annotations

import asyncio
import signal

import pytest

from prefixpool_testing.eventually import eventually
from prefixpool_testing.sim_pool import PoolOptions, SimPool, text
from prefixpool_testing.traffic import clients_of, streams, traffic

POOL = PoolOptions(replicas=3, routers=2, device_blocks=2000, time_scale=0.1)
NO_HANG_S = 45.0  # of which 15 s until the agent is sure


@pytest.mark.timeout(300)
async def test_nobody_hangs_on_an_engine_that_was_stopped(pool: SimPool) -> None:
    said = [text(f"{i} stream when an engine hangs", 30) for i in range(18)]
    async with traffic(clients_of(pool)) as seen, streams(clients_of(pool), said, tokens=2000) as running:
        victim = running[0].replica
        pool.local.kill(victim, "engine", signal.SIGSTOP)
        hung = [stream for stream in running if stream.replica == victim]
        async with asyncio.timeout(NO_HANG_S):
            await asyncio.gather(*(stream.rest() for stream in hung))
        await seen.more(100)
        pool.local.kill(victim, "engine", signal.SIGCONT)
        await pool.usable(victim)
        await asyncio.gather(*(stream.rest() for stream in running))
        await seen.more(100)
    assert [(stream.done, len(stream.errors)) for stream in hung] == [(False, 1)] * len(hung)
    assert {stream.done for stream in running if stream not in hung} == {True}
    assert not seen.failures

    async def idle() -> bool:
        return not any([(await pool.info(name)).inflight for name in pool.names])

    await eventually(idle, what="nothing under way")
