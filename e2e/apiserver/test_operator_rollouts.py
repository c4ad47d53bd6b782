"""Changes reach pods one after the other; an upgrade of the operator reaches routers and no engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from prefixpool_operator.kube import UnavailableError
from prefixpool_operator.observed import Raw
from prefixpool_testing.cluster.api_server import ApiServer
from prefixpool_testing.eventually import eventually
from prefixpool_testing.operated import Place, operated

REPLICAS = 3


@asynccontextmanager
async def kubelet_at_work(place: Place, pool: str) -> AsyncIterator[list[int]]:
    """Declares pods ready as they come; yields how many were ready whenever it looked. When it breaks, the test does."""
    ready: list[int] = []

    async def work() -> None:
        while True:
            with suppress(UnavailableError):  # it tries again
                ready.append(sum(is_ready(pod) for pod in await place.pods(pool)))
                await place.kubelet.run_pods(place.namespace, pool)
            await asyncio.sleep(0.2)

    async with asyncio.TaskGroup() as group:
        working = group.create_task(work())
        yield ready
        working.cancel()


def is_ready(pod: Raw) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def uids(pods: list[Raw]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


def images(pod: Raw) -> dict[str, str]:
    return {one["name"]: one["image"] for one in (*pod["spec"]["containers"], *pod["spec"].get("initContainers", ()))}


async def test_a_changed_spec_replaces_pods_one_at_a_time(api: ApiServer) -> None:
    async with operated(api, "--resync-s", "5") as (client, _):
        with Place(api, client) as place:
            await place.apply("p", replicas=REPLICAS)
            await place.serve("p", REPLICAS)
            before = uids(await place.pods("p"))
            await place.apply("p", replicas=REPLICAS, engine={"kind": "sim", "maxNumSeqs": 7})
            async with kubelet_at_work(place, "p") as ready:

                async def replaced() -> bool:
                    pods = await place.pods("p")
                    return len(pods) == REPLICAS and not uids(pods) & before and all(map(is_ready, pods))

                await eventually(replaced, within_s=90, what="all pods are new and ready")
                await place.until("p", "Progressing", "False", "Settled")
            assert min(ready) >= REPLICAS - 1, ready


async def test_an_operator_upgrade_changes_routers_in_place_and_restarts_no_engine(api: ApiServer) -> None:
    async with operated(api, "--resync-s", "5") as (client, _):
        place = Place(api, client)
        await place.apply("p", replicas=REPLICAS)
        await place.serve("p", REPLICAS)
        before = uids(await place.pods("p"))
    upgraded = ("--worker-image", "worker:2", "--router-image", "router:2", "--resync-s", "5")
    async with operated(api, *upgraded) as (client, _):
        place.client, place.kubelet = client, type(place.kubelet)(client)
        with place:
            async with kubelet_at_work(place, "p"):

                async def updated() -> bool:
                    return all(images(pod)["router"] == "router:2" for pod in await place.pods("p"))

                await eventually(updated, within_s=90, what="all routers have the new image")
                await place.until("p", "Progressing", "False", "Settled")
            pods = await place.pods("p")
            assert uids(pods) == before
            assert {images(pod)["worker"] for pod in pods} == {"worker:1"}
