"""From the previous release to this one: its objects are taken over, and no engine is restarted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from prefixpool_operator import kube
from prefixpool_testing.cluster import previous
from prefixpool_testing.cluster.product import POOL_S, PoolPlace, install, install_objects, is_ready
from prefixpool_testing.eventually import eventually
from prefixpool_testing.operated import LOOK_S, POOLS
from prefixpool_testing.traffic import traffic

POOL = previous.POOL


@pytest.mark.alone
async def test_pods_of_the_previous_release_run_on_under_this_one(place: PoolPlace) -> None:
    await asyncio.to_thread(install_objects, place.cluster, previous.chart_objects())
    await place.apply(POOL)
    await place.until_ready(POOL, 2)
    async with place.without_operator():
        await replace_stateful_set(place)
        before = await engines(place)
        client = await place.client_of(POOL)
        async with traffic([client, client]) as seen:
            await seen.more(10)
            await asyncio.to_thread(install, place.cluster)
            await place.kubectl("scale", f"{POOLS}/{POOL}", "--replicas=3")
            await place.until_ready(POOL, 3)
            await seen.more(10)
    assert not seen.failures
    assert before.items() <= (await engines(place)).items()
    assert set((await place.restarts(POOL)).values()) == {0}


async def replace_stateful_set(place: PoolPlace) -> None:
    """By the one that the previous operator left, with pods made from it."""
    await place.kubectl("delete", "statefulset", POOL, "--cascade=foreground", "--timeout=100s")
    pool = await place.get(kube.POOL, POOL)
    await asyncio.to_thread(place.api.apply, previous.stateful_set(pool))

    async def ready() -> bool:
        pods = await place.workers(POOL)
        return len(pods) == 2 and all(map(is_ready, pods))

    await eventually(ready, within_s=POOL_S, every_s=LOOK_S, what="two pods, made from the previous release's template")


async def engines(place: PoolPlace) -> dict[str, Any]:
    """Pods by name."""
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in await place.workers(POOL)}
