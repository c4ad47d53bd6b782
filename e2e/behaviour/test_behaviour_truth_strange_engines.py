"""Engines whose KV events are odd, incomplete or missing: what is known stays true, what is not is said (peers.md 3.A).

All pools of this module start at once and get their first request then, because a missing publisher is told within 10 s.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import NamedTuple

import pytest
import pytest_asyncio

from prefixpool_testing.eventually import eventually
from prefixpool_testing.sim_pool import text
from prefixpool_testing.strange_pool import StrangePool, strange_pool
from prefixpool_testing.strange_sim import LAST_BATCHES

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK = 32
TOLD_WITHIN_S = 10.0
SMALL = 70  # blocks: some six of the texts below


class Odd(NamedTuple):
    """One of the pools, and when its publisher fell silent."""

    pool: StrangePool
    silent_since_s: float


class Records(logging.Handler):
    """Keeps what routers of this process logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture(scope="module")
def router_log() -> list[logging.LogRecord]:
    handler = Records()
    logger = logging.getLogger("prefixpool_router")
    logger.addHandler(handler)
    return handler.records


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def odd(router_log: list[logging.LogRecord]) -> AsyncIterator[dict[str, Odd]]:
    """All pools, by habit."""
    made: dict[str, Odd] = {}
    async with AsyncExitStack() as stack:

        async def start(habit: str, *flags: str, blocks: int = 400) -> None:
            pool = await stack.enter_async_context(strange_pool(habit, *flags, blocks=blocks))
            if habit == "dying_publisher":
                while pool.view.boundaries == 0:  # while it lives
                    await pool.client.chat(text("before the publisher dies"))
                    await asyncio.sleep(0.05)
                for i in range(LAST_BATCHES):
                    await pool.client.chat(text(f"{i} as the publisher dies"))
            await pool.client.chat(text("first"))
            made[habit] = Odd(pool, time.monotonic())

        await asyncio.gather(
            start("no_endpoint"),
            start("dying_publisher"),
            start("byte_hashes", blocks=SMALL),
            start("placeholders", "--host-blocks=150", blocks=SMALL),
        )
        yield made


@pytest.mark.parametrize("habit", ["byte_hashes", "placeholders"])
async def test_predictions_are_right_whatever_the_hashes_look_like__peers_10(odd: dict[str, Odd], habit: str) -> None:
    pool = odd[habit].pool
    said = text(f"{habit} said twice")
    first = await pool.elsewhere.chat(said)
    await pool.settled()
    second = await pool.client.chat(said)
    assert (first.cached, first.predicted) == (0, 0)
    assert second.cached == (second.prompt - 1) // BLOCK * BLOCK
    assert abs(second.predicted - second.cached) <= BLOCK
    assert pool.view.mode == "precise"


async def test_evicted_blocks_with_byte_hashes_are_forgotten__peers_10(odd: dict[str, Odd]) -> None:
    pool = odd["byte_hashes"].pool
    said = [text(f"{i} to be evicted") for i in range(12)]
    for one in said:
        await pool.elsewhere.chat(one)
    await pool.settled()
    newest = await pool.client.chat(said[-1])
    oldest = await pool.client.chat(said[0])
    assert newest.cached > 0
    assert (oldest.cached, oldest.predicted) == (0, 0)


async def test_placeholders_keep_the_host_tier_true__peers_11(odd: dict[str, Odd]) -> None:
    """Blocks that events name by hash only: found there once the device forgot them, and only for as long."""
    pool = odd["placeholders"].pool
    said = [text(f"{i} to sink to the host") for i in range(24)]
    for one in said:
        await pool.elsewhere.chat(one)
    await pool.settled()
    sunk = await pool.client.chat(said[12])
    (seen,) = pool.explain(sunk.request_id).candidates
    assert seen.device_tokens == 0, "the device should have forgotten it"
    assert sunk.cached == (sunk.prompt - 1) // BLOCK * BLOCK, "the host tier should have kept it"
    assert abs(sunk.predicted - sunk.cached) <= BLOCK
    oldest = await pool.client.chat(said[0])
    assert (oldest.cached, oldest.predicted) == (0, 0)
    assert pool.view.mode == "precise"
    assert 'residency_ignored_total{reason="placeholder_blocks"}' in await pool.agent_metrics()


@pytest.mark.parametrize(
    ("habit", "words"),
    [
        ("no_endpoint", "no KV event endpoint answered"),
        ("dying_publisher", "the engine answers requests but sends no KV events"),
    ],
)
async def test_missing_publisher_is_told_and_history_takes_over__peers_6(
    odd: dict[str, Odd], router_log: list[logging.LogRecord], habit: str, words: str
) -> None:
    pool, since_s = odd[habit]

    async def told() -> bool:
        return (await pool.info()).mode == "approximate" and pool.view.mode == "approximate"

    left_s = TOLD_WITHIN_S - (time.monotonic() - since_s)
    if not await told():
        await eventually(told, within_s=left_s, what=f"{habit} is told by agent and router")
    assert words in (await pool.info()).reason
    assert words in pool.view.mode_why
    assert pool.view.usable, "the engine itself is well"
    assert 'prefixpool_agent_mode{mode="approximate"} 1.0' in await pool.agent_metrics()
    assert 'prefixpool_router_replica_mode{mode="approximate",replica="odd-0"} 1.0' in await pool.router_metrics()
    assert words in pool.agent_log()
    assert any(words in str(getattr(record, "why", "")) for record in router_log)
    said = text(f"{habit}: by history")
    first = await pool.client.chat(said)
    second = await pool.client.chat(said)
    assert first.predicted == 0
    assert abs(second.predicted - second.cached) <= BLOCK
    assert pool.explain(second.request_id).mode == "approximate"
