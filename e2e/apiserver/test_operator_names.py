"""Children whose label, name or Secret somebody took: whose they are is told by their owner, and they are put right."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from prefixpool_operator import kube
from prefixpool_operator.identity import L_POOL
from prefixpool_operator.kube_client import KubeClient
from prefixpool_testing.cluster.api_server import ApiServer
from prefixpool_testing.eventually import eventually
from prefixpool_testing.operated import POOLS, Place, operated

pytestmark = pytest.mark.asyncio(loop_scope="module")

MANAGED_BY = "app.kubernetes.io/managed-by"
SERVICE = kube.resource_of("Service")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(api: ApiServer) -> AsyncIterator[KubeClient]:
    async with operated(api, "--resync-s", "5") as (client, _):
        yield client


@pytest.mark.parametrize("labels", [(L_POOL,), (MANAGED_BY,), (L_POOL, MANAGED_BY)], ids=" ".join)
async def test_a_statefulset_whose_label_was_removed_gave_name_taken(place: Place, labels: tuple[str, ...]) -> None:
    await place.apply("p")
    await place.serve("p", replicas=2)
    uids = {pod["metadata"]["uid"] for pod in await place.pods("p")}
    before = await place.get(kube.STATEFUL_SET, "p")
    assert before is not None
    await place.kubectl("label", "statefulset/p", *(f"{label}-" for label in labels))

    async def put_back() -> bool:
        assert (await place.condition("p", "Accepted"))[0] in ("", "True")
        now = await place.get(kube.STATEFUL_SET, "p")
        return now is not None and now["metadata"]["labels"] == before["metadata"]["labels"]

    await eventually(put_back, within_s=30, what="the labels are there again")
    after = await place.get(kube.STATEFUL_SET, "p")
    assert after is not None
    assert after["metadata"]["generation"] == before["metadata"]["generation"], "the spec is as it was"
    await place.serve("p", replicas=2)
    assert {pod["metadata"]["uid"] for pod in await place.pods("p")} == uids


async def test_a_label_that_somebody_insists_on_removing_is_told(place: Place) -> None:
    await place.apply("p")
    await place.serve("p", replicas=2)
    for _ in range(2):
        await place.kubectl("label", "service/p", f"{L_POOL}-")

        async def settled() -> bool:
            service = await place.get(SERVICE, "p")
            assert service is not None
            insists = (await place.condition("p", "Degraded"))[1] == "ForeignEdits"
            return insists or service["metadata"]["labels"].get(L_POOL) == "p"

        await eventually(settled, within_s=30, what="it is put back, or told")
    message = await place.until("p", "Degraded", "True", "ForeignEdits")
    assert f"Service p: metadata.labels.{L_POOL} again" in message
    assert (await place.condition("p", "Accepted"))[0] == "True"


async def test_pools_made_at_the_same_moment_whose_children_need_one_name(place: Place) -> None:
    """Pool `a` has a Service `a-replicas` for its replicas, and pool `a-replicas` one for its clients."""
    names = ("a", "a-replicas")
    await asyncio.gather(*(place.apply(name) for name in names))

    async def one_has_it() -> list[str]:
        seen = {name: await place.condition(name, "Accepted") for name in names}
        taken = [name for name, (_, reason, _) in seen.items() if reason == "NameTaken"]
        return taken if sorted(status for status, _, _ in seen.values()) == ["False", "True"] else []

    (loser,) = await eventually(one_has_it, within_s=30, what="one is accepted, and the other one told")
    (winner,) = {*names} - {loser}
    service, pool = await place.get(SERVICE, "a-replicas"), await place.get(kube.POOL, winner)
    assert service is not None
    assert pool is not None
    assert [owner["uid"] for owner in service["metadata"]["ownerReferences"]] == [pool["metadata"]["uid"]]
    assert await place.children(loser) == {}, "nothing of a pool that is told to take another name"
    await place.serve(winner, replicas=2)
    await place.kubectl("delete", f"{POOLS}/{winner}")
    await place.until(loser, "Accepted", "True", within_s=90)
    await place.serve(loser, replicas=2)


async def test_the_deleted_keys_of_an_idle_pool_came_back_only_after_ten_resyncs(place: Place) -> None:
    await place.apply("p")
    await place.serve("p", replicas=2)
    await place.until("p", "Progressing", "False")
    await place.kubectl("delete", "secret/p-keys")

    async def back() -> bool:
        return await place.get(kube.SECRET, "p-keys") is not None

    await eventually(back, within_s=20, what="there are keys again")
