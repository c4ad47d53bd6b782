"""Greedy answers of a pool are those of one engine alone, however its requests were placed, cached, evicted and retried."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio

from prefixpool import names
from prefixpool_cli.demo import workload
from prefixpool_cli.demo.client import ChatClient
from prefixpool_cli.demo.greedy import compare
from prefixpool_cli.demo.runner import ArmPlan, run_arm
from prefixpool_testing.sim_pool import KEYS, MODEL, PoolOptions, SimPool, lone_engine

pytestmark = pytest.mark.asyncio(loop_scope="module")

POOL = PoolOptions(device_blocks=280, time_scale=0.005)
REQUESTS = 220  # of the demo's workload: all
CONCURRENCY = 6


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(pool: SimPool, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChatClient]:
    """An engine that is in no pool, with room for everything, hence without eviction."""
    async with lone_engine(tmp_path_factory.mktemp("alone"), blocks=4000) as url:
        yield ChatClient(pool.http, url, MODEL)


@pytest.mark.parametrize("policy", ["prefix", "random"])
async def test_greedy_answers_are_those_of_one_engine(pool: SimPool, alone: ChatClient, policy: str) -> None:
    part = workload.first(workload.load(), REQUESTS)
    async with aiohttp.ClientSession(headers={names.H_POLICY: policy}) as http:
        through_pool = ChatClient(http, pool.client.url, MODEL, KEYS["alpha"])
        arm = await run_arm(through_pool, part, ArmPlan(policy, policy), CONCURRENCY, lambda _: None)
    assert [sample.error for sample in arm.samples if sample.error] == []
    assert {sample.replica for sample in arm.samples} == set(pool.names)
    assert sum(sample.cached_tokens > 0 for sample in arm.samples) > REQUESTS // 4, "hardly anything came from a cache"
    partly = [sample for sample in arm.samples if sample.turn and sample.cached_tokens < sample.prompt_tokens // 2]
    assert partly, "nothing was evicted"
    figures = await compare(alone, arm, part, CONCURRENCY, lambda _: None)
    assert (figures.compared, figures.equal) == (REQUESTS, REQUESTS), figures
