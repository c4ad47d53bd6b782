"""Routers in pods hear of pods that come, go and change, and nothing is written while nothing changes (peers.md 3 C, F)."""

from __future__ import annotations

import pytest

from prefixpool_testing import chart
from prefixpool_testing.cluster.audit import Request
from prefixpool_testing.cluster.product import PoolPlace
from prefixpool_testing.eventually import eventually
from prefixpool_testing.operated import POOLS
from prefixpool_testing.traffic import traffic

FENCED_S = 2.0  # promised: from the API's word until nothing new is sent
HEALED_S = 60.0  # TCP itself takes its time to find that a cut is over
RESYNC_S = 60.0
OPERATOR = f"system:serviceaccount:{chart.NAMESPACE}:prefixpool-operator"


async def members(place: PoolPlace, pool: str, router: str) -> set[str]:
    """Whom one router knows."""
    return {view.name for view in (await place.routers(pool))[router].replicas}


async def test_a_pod_deleted_while_a_router_is_cut_from_the_api_is_no_ghost__peers_35(place: PoolPlace) -> None:
    await place.apply("ghost", replicas=3)
    await place.until_ready("ghost", 3)
    cut_off, *_ = await place.workers("ghost")
    client = place.router_of(cut_off)
    async with traffic([client]) as seen:
        with place.cluster.cut_from_api(cut_off["status"]["podIP"]):
            await place.kubectl("scale", f"{POOLS}/ghost", "--replicas=2")
            await place.until_ready("ghost", 2)
            await seen.more(20)
            assert await members(place, "ghost", "ghost-0") == {"ghost-0", "ghost-1", "ghost-2"}

        async def gone() -> bool:
            return await members(place, "ghost", "ghost-0") == {"ghost-0", "ghost-1"}

        await eventually(gone, within_s=HEALED_S, what="the router has heard that the pod is gone")
        await seen.more(20)
    assert not seen.failures


async def test_a_pod_whose_label_is_taken_away_gets_nothing_new__peers_36(place: PoolPlace) -> None:
    await place.apply("label", replicas=3)
    await place.until_ready("label", 3)
    client = await place.client_of("label")

    async def known() -> bool:
        return all({view.name for view in one.replicas} >= {"label-2"} for one in (await place.routers("label")).values())

    async with traffic([client, client]) as seen:
        await seen.more(20)
        await place.kubectl("label", "pod", "label-2", "app.kubernetes.io/component-")

        async def forgotten() -> bool:
            routers = await place.routers("label")
            return all(
                {view.name for view in one.replicas if view.usable} == {"label-0", "label-1"} for one in routers.values()
            )

        await eventually(forgotten, within_s=FENCED_S, what="nothing is sent to the pod without its label")
        await seen.each_lane()
        before = seen.served["label-2"]
        await seen.more(30)
        assert seen.served["label-2"] == before
        await place.kubectl("label", "--overwrite", "pod", "label-2", "app.kubernetes.io/component=worker")
        await eventually(known, within_s=HEALED_S, what="it is a member again")
        await place.until_ready("label", 3)
    assert not seen.failures


async def test_new_replicas_get_requests_once_they_can_answer_and_no_sooner__peers_37_72(place: PoolPlace) -> None:
    await place.apply("more", replicas=1)
    await place.until_ready("more", 1)
    client = await place.client_of("more")
    async with traffic([client, client]) as seen:
        await seen.more(10)
        await place.kubectl("scale", f"{POOLS}/more", "--replicas=3")
        await place.until_ready("more", 3)

        async def all_serve() -> bool:
            return set(seen.served) == {"more-0", "more-1", "more-2"}

        await eventually(all_serve, within_s=HEALED_S, what="all replicas serve")
    assert not seen.failures
    for pod in await place.workers("more"):
        assert await place.metric(pod, "prefixpool_router_retries_total") == 0, "nobody was asked in vain"


@pytest.mark.long
async def test_an_idle_pool_causes_no_writes__peers_75(place: PoolPlace) -> None:
    await place.apply("idle", replicas=2)
    await place.until_ready("idle", 2)
    await writes_until_resync(place)
    found = await writes_until_resync(place) and await writes_until_resync(place)  # Kubernetes may have gone on for a while
    assert found == []


async def writes_until_resync(place: PoolPlace) -> list[Request]:
    """Of the operator, in this namespace, from now until it has listed all pools again."""
    since_bytes = place.api.audit_log.stat().st_size

    def asked() -> list[Request]:
        return [one for one in place.api.asked(since_bytes) if one.user.username == OPERATOR]

    async def resync() -> bool:
        return any(one.verb == "list" and one.object_ref.resource == "inferencepools" for one in asked())

    await eventually(resync, within_s=2 * RESYNC_S, every_s=1.0, what="the operator lists all pools")
    return [one for one in asked() if one.writes and one.object_ref.namespace == place.namespace]
