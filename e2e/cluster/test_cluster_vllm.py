"""The main job with real vLLM in the cluster: two replicas, one model, one cache that survives what happens to a pod."""

from __future__ import annotations

import asyncio
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from prefixpool_agent.engines.metrics import parse_load
from prefixpool_operator import kube
from prefixpool_testing.cluster import vllm
from prefixpool_testing.cluster.node import Node
from prefixpool_testing.cluster.product import MODEL, PoolPlace
from prefixpool_testing.eventually import eventually
from prefixpool_testing.pool_client import PoolClient, Reply
from prefixpool_testing.sim_pool import text

pytestmark = pytest.mark.engine

POOL = "real"
START_S = 600.0  # two engines at once, on two cores
NEW_PROMPTS = 30


@pytest.fixture
def volume(cluster: Node) -> Iterator[str]:
    with vllm.volume(cluster) as name:
        yield name


@contextmanager
def phase(what: str) -> Iterator[None]:
    began_s = time.monotonic()
    yield
    print(f"{time.monotonic() - began_s:6.1f} s  {what}")


async def cached_again(client: PoolClient, said: str, where: str) -> Reply:
    """The same prompt until it is known: agents hear of blocks some milliseconds after the answer."""
    seen: list[tuple[str, int, int]] = []

    async def check() -> Reply | None:
        reply = await client.chat(said)
        seen.append((reply.replica, reply.predicted, reply.cached))
        whole = (reply.prompt - 1) // vllm.BLOCK * vllm.BLOCK
        return reply if (reply.replica, reply.predicted, reply.cached) == (where, whole, whole) else None

    found = await eventually(
        check, within_s=60, what=f"{where} has the prompt, and routers know; (replica, predicted, cached): {seen}"
    )
    assert found is not None
    return found


async def test_two_real_replicas_are_one_cache_before_and_after_one_of_them_is_deleted(
    volume: str, place: PoolPlace
) -> None:
    said = text("a long document", 400)
    with phase("from nothing to two ready replicas"):
        await asyncio.to_thread(place.api.apply, vllm.claim(place.namespace, volume))
        await place.apply(POOL, **vllm.spec(MODEL), replicas=2)
        await place.until_ready(POOL, 2, within_s=START_S)
    service = await place.client_of(POOL)
    with phase("a prompt, computed once, and known to the routers of all pods"):
        first = await service.chat(said)
        assert first.cached <= vllm.BLOCK, "at most the template's own first words"
        await cached_again(service, said, first.replica)
        for pod in await place.workers(POOL):
            await cached_again(place.router_of(pod), said, first.replica)
    with phase("sizes as measured"):
        await place.until(POOL, "Sized", "True", "Measured", within_s=60)
        pool = await place.get(kube.POOL, POOL)
        assert pool is not None
        planned = pool["status"]["sizing"]["devicePerReplica"]["blocks"]
        assert [await blocks(place, pod) for pod in await place.workers(POOL)] == [planned, planned]

    victim, uid = first.replica, await uid_of(place, first.replica)
    with phase("the pod that has it is deleted: the other one serves"):
        await place.kubectl("delete", "pod", victim, "--wait=false")
        other = await elsewhere(service, said, victim)
        assert other.cached <= vllm.BLOCK
        await cached_again(service, said, other.replica)
    with phase("its successor is ready"):
        await eventually(lambda: replaced(place, victim, uid), within_s=START_S, what=f"{victim} is replaced")
        await place.until_ready(POOL, 2, within_s=START_S)
    with phase("and used"):
        await cached_again(service, said, other.replica)
        await cached_again(service, await new_prompt_on(service, victim), victim)
    assert set((await place.restarts(POOL)).values()) == {0}


async def elsewhere(client: PoolClient, said: str, victim: str) -> Reply:
    """The first answer that isn't the victim's, which finishes what it has."""
    for _ in range(NEW_PROMPTS):
        reply = await client.chat(said)
        if reply.replica != victim:
            return reply
    raise AssertionError(f"{victim} is being deleted and goes on serving")


async def new_prompt_on(client: PoolClient, replica: str) -> str:
    """One that this replica was the first to see."""
    for number in range(NEW_PROMPTS):
        said = text(f"{number} after all", 100)
        if (await client.chat(said)).replica == replica:
            return said
    raise AssertionError(f"{replica} got none of {NEW_PROMPTS} new prompts")


async def uid_of(place: PoolPlace, pod: str) -> str:
    found = await place.get(kube.POD, pod)
    return found["metadata"]["uid"] if found else ""


async def replaced(place: PoolPlace, pod: str, before: str) -> bool:
    return await uid_of(place, pod) not in ("", before)


async def blocks(place: PoolPlace, pod: Any) -> int:
    """Of its engine, the null block included, by its own metrics."""
    secret = await place.get(kube.SECRET, f"{POOL}-keys")
    assert secret is not None
    engine = place.engine_of(pod, b64decode(secret["data"]["engine"]).decode())
    cache = parse_load((await engine.get("/metrics")).body.decode()).cache
    assert cache is not None
    return cache.usable_blocks + 1
