"""A pool from apply to delete, on a cluster whose pods run."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixpool_testing.cluster.product import POOL_S, PoolPlace
from prefixpool_testing.eventually import eventually
from prefixpool_testing.operated import LOOK_S
from prefixpool_testing.pool_client import COMPLETIONS
from prefixpool_testing.sim_pool import text
from prefixpool_testing.traffic import streams, traffic

EXAMPLE = Path(__file__).parents[2] / "examples/sim.yaml"


async def test_apply_serve_delete(place: PoolPlace) -> None:
    await place.kubectl("apply", "-f", str(EXAMPLE))
    await place.kubectl("scale", "inferencepools.prefixpool.dev/sim", "--replicas=3")
    await place.until_ready("sim", 3)
    client = await place.client_of("sim")
    reply = await client.post(COMPLETIONS, {"prompt": text("hello"), "max_tokens": 4})
    assert reply.status == 200, reply.body
    said = text("a document", 400)
    first = await client.chat(said)

    async def reused() -> bool:
        again = await client.chat(said)
        return again.cached > 0 and again.replica == first.replica

    await eventually(reused, what="the same prompt is served from the cache of the same replica")
    await place.kubectl("delete", "inferencepools.prefixpool.dev/sim")

    async def nothing_left() -> bool:
        return not await place.children("sim")

    await eventually(nothing_left, within_s=120, every_s=LOOK_S, what="nothing is left of the pool")


@pytest.mark.long
async def test_changed_engine_arguments_roll_without_a_failed_request(place: PoolPlace) -> None:
    await place.apply("roll", replicas=3)
    await place.until_ready("roll", 3)
    before = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in await place.workers("roll")}
    client = await place.client_of("roll")
    async with place.ready_counts("roll") as ready, traffic([client]) as seen:
        await seen.more(20)
        await place.apply("roll", replicas=3, engine={"kind": "sim", "extraArgs": ["--time-scale=0.5"]})
        await place.until_ready("roll", 3, within_s=3 * POOL_S)  # one after the other
        await seen.more(20)
    assert not seen.failures
    assert min(ready) >= 2
    after = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in await place.workers("roll")}
    assert after.keys() == before.keys()
    assert all(after[name] != before[name] for name in before)


@pytest.mark.long
async def test_scaling_down_fails_no_request_and_running_streams_finish(place: PoolPlace) -> None:
    await place.apply("down", replicas=3)
    await place.until_ready("down", 3)
    client = await place.client_of("down")
    said = [text(f"long {number}", 50) for number in range(24)]  # so many that none of three replicas is passed over
    async with streams([client], said, tokens=300) as running, traffic([client, client]) as seen:
        assert len({stream.replica for stream in running}) == 3
        await seen.more(10)
        await place.kubectl("scale", "inferencepools.prefixpool.dev/down", "--replicas=1")
        await place.until_ready("down", 1)
        await seen.more(20)
        for stream in running:
            await stream.rest()
    assert not seen.failures
    assert all(stream.done and not stream.errors for stream in running)


@pytest.mark.alone
async def test_an_operator_that_is_down_stops_no_serving_and_catches_up(place: PoolPlace) -> None:
    await place.apply("alone", replicas=3)
    await place.until_ready("alone", 3)
    client = await place.client_of("alone")
    async with traffic([client, client]) as seen:
        async with place.without_operator():
            await place.kubectl("delete", "pod", "alone-0", "--wait=false")
            await place.apply("alone", replicas=2)
            await seen.more(50)
            assert len(await place.workers("alone")) == 3
        await place.until_ready("alone", 2)
        await seen.more(20)
    assert not seen.failures


@pytest.mark.alone
async def test_another_router_image_restarts_no_engine(place: PoolPlace) -> None:
    await place.apply("image", replicas=2)
    await place.until_ready("image", 2)
    expected = {key: count + (key[1] == "router") for key, count in (await place.restarts("image")).items()}
    client = await place.client_of("image")
    async with traffic([client, client]) as seen, place.other_router_image() as other:

        async def swapped() -> bool:
            return await place.router_images("image") == {other} and await place.restarts("image") == expected

        await seen.more(10)
        await eventually(
            swapped,
            within_s=120,
            every_s=LOOK_S,
            what="routers were restarted with the other image, and nothing else was",
        )
        await place.until_ready("image", 2)
        await seen.more(20)
        assert await place.restarts("image") == expected
    assert not seen.failures


@pytest.mark.long
@pytest.mark.parametrize("container", ["worker", "router"])
async def test_a_killed_container_comes_back_and_only_its_own_requests_suffer(place: PoolPlace, container: str) -> None:
    await place.apply("kill", replicas=3)
    await place.until_ready("kill", 3)
    client = await place.client_of("kill")
    before = await place.restarts("kill")
    async with traffic([client, client], lanes=3) as seen:
        await seen.more(10)
        for pod in await place.workers("kill"):
            name = pod["metadata"]["name"]
            place.cluster.kill_container(name, container, place.namespace)
            await place.until_restarted("kill", name, container, before[name, container] + 1)
            await place.until_ready("kill", 3)
            await seen.more(10)
    assert await place.restarts("kill") == {key: count + (key[1] == container) for key, count in before.items()}
    assert len(seen.failures) <= 3 * 3, seen.failures  # what was inside the killed one: at most a request a lane
