"""The operator on a real API server, with the rights that the project ships and no others. Pods are objects only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import pytest
import pytest_asyncio

from prefixpool.api import crd
from prefixpool_operator import kube
from prefixpool_operator.kube_client import KubeClient
from prefixpool_operator.observed import Key, Raw
from prefixpool_testing.cluster.api_server import ApiServer
from prefixpool_testing.cluster.errors import ClusterError
from prefixpool_testing.eventually import eventually
from prefixpool_testing.gateway_pool import GATEWAY_CRD
from prefixpool_testing.operated import POOLS, Place, operated
from prefixpool_testing.operator_program import ACCOUNT, NAMESPACE, OperatorProgram

pytestmark = pytest.mark.asyncio(loop_scope="module")

USER = f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}"
RESYNC_S = 10
SERVICE = kube.resource_of("Service")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(api: ApiServer) -> AsyncIterator[tuple[ApiServer, KubeClient, OperatorProgram]]:
    """With the Gateway API's InferencePool beside ours from the start."""
    api.apply(GATEWAY_CRD)
    since_bytes = api.audit_log.stat().st_size  # an API server that has just started refuses everything for a moment
    async with operated(api, "--resync-s", str(RESYNC_S)) as (client, operator):
        yield api, client, operator
    forbidden = [one for one in api.asked(since_bytes) if one.user.username == USER and one.response_status.code == 403]
    assert forbidden == [], "the shipped rules lack something that the operator asks for"


@pytest.fixture
def place(cluster: tuple[ApiServer, KubeClient, OperatorProgram]) -> Iterator[Place]:
    with Place(cluster[0], cluster[1]) as made:
        yield made


async def test_apply_makes_children_and_delete_leaves_nothing(place: Place) -> None:
    await place.apply("p")
    await place.serve("p", replicas=2)
    children = await place.children("p")
    expected = {
        ("StatefulSet", "p"),
        ("Service", "p"),
        ("Service", "p-replicas"),
        ("ServiceAccount", "p"),
        ("PodDisruptionBudget", "p"),
        ("NetworkPolicy", "p"),
        ("Secret", "p-keys"),
        ("Role", "p"),
        ("RoleBinding", "p"),
        ("Pod", "p-0"),
        ("Pod", "p-1"),
    }
    assert expected <= children.keys()
    pool = await place.get(kube.POOL, "p")
    assert pool is not None
    for (kind, name), child in children.items():
        (owner,) = child["metadata"]["ownerReferences"]
        assert owner["uid"] == pool["metadata"]["uid"] or kind == "Pod", (kind, name)
    assert pool["status"]["readyReplicas"] == 2
    assert "finalizers" not in pool["metadata"]
    assert not pool["metadata"].get("annotations"), "nobody writes annotations on pools"
    await place.kubectl("delete", f"{POOLS}/p")

    async def nothing_left() -> bool:
        return not await place.children("p")

    await eventually(nothing_left, within_s=60, what="everything of the pool is collected")


@pytest.fixture
def lenient(api: ApiServer) -> Iterator[None]:
    """A CRD of before the rules: what it let in has to be read by an operator that knows better."""
    api.apply(without_rules(crd.definition()))
    yield
    api.apply(crd.definition())


def without_rules(schema: Any) -> Any:
    if isinstance(schema, list):
        return [without_rules(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: without_rules(inner) for key, inner in schema.items() if key != "x-kubernetes-validations"}


async def apply_invalid(place: Place) -> None:
    """As soon as the API server has taken the lenient CRD up."""

    async def taken() -> bool:
        try:
            await place.apply("p", minReplicas=1)
        except ClusterError:
            return False
        return True

    await eventually(taken, what="the API server lets an invalid pool in")


@pytest.mark.usefixtures("lenient")
async def test_an_invalid_spec_is_told_and_its_correction_is_enough(place: Place) -> None:
    await apply_invalid(place)
    message = await place.until("p", "Accepted", "False", "InvalidSpec")
    assert "minReplicas" in message
    assert await place.children("p") == {}
    await place.apply("p")
    await place.until("p", "Accepted", "True")
    await place.serve("p", replicas=2)


@pytest.mark.usefixtures("lenient")
async def test_an_invalid_change_leaves_what_runs_alone(place: Place) -> None:
    await place.apply("p")
    await place.serve("p", replicas=2)
    before = await place.children("p")
    await apply_invalid(place)
    await place.until("p", "Accepted", "False")
    after = await place.children("p")
    assert versions(after) == versions(before)


def versions(objects: Mapping[Key, Raw]) -> dict[Key, str]:
    return {key: obj["metadata"]["resourceVersion"] for key, obj in objects.items()}


async def test_a_model_that_does_not_fit_is_told_before_any_pod_starts(place: Place) -> None:
    await place.apply("p", accelerator={"resource": "cpu", "memory": "100Mi"})
    assert "fit" in await place.until("p", "Sized", "False", "DoesNotFit")
    assert await place.pods("p") == []
    await place.apply("p")
    await place.serve("p", replicas=2)


async def test_a_foreign_edit_is_put_back_once(place: Place) -> None:
    await place.apply("p")
    await place.serve("p", replicas=2)
    before = await place.get(SERVICE, "p")
    assert before is not None
    since_bytes = place.api.audit_log.stat().st_size
    patch = '{"spec":{"selector":{"app":"theirs"}}}'
    await place.kubectl("patch", "service/p", "--type=merge", "-p", patch)

    async def put_back() -> bool:
        now = await place.get(SERVICE, "p")
        return now is not None and now["spec"]["selector"] == before["spec"]["selector"]

    await eventually(put_back, within_s=30, what="the selector is ours again")
    await place.kubectl("scale", f"{POOLS}/p", "--replicas=1")  # looks again, and has done so when this is done
    await place.serve("p", replicas=1)
    asked = [one for one in place.api.asked(since_bytes) if one.writes and one.user.username == USER]
    assert [one.object_ref.name for one in asked if one.object_ref.resource == "services"] == ["p"]


async def test_a_deleted_child_comes_back(place: Place) -> None:
    await place.apply("p")
    await place.serve("p", replicas=2)
    await place.kubectl("delete", "service/p", "networkpolicy/p")

    async def back() -> bool:
        return {("Service", "p"), ("NetworkPolicy", "p")} <= (await place.children("p")).keys()

    await eventually(back, within_s=30, what="they are there again")


async def test_kubectl_scale_is_respected(place: Place) -> None:
    await place.apply("p")
    await place.serve("p", replicas=2)
    await place.kubectl("scale", f"{POOLS}/p", "--replicas=3")
    await place.serve("p", replicas=3)
    await place.kubectl("scale", f"{POOLS}/p", "--replicas=1")

    async def shrunk() -> bool:
        return [pod["metadata"]["name"] for pod in await place.pods("p")] == ["p-0"]

    await eventually(shrunk, within_s=60, what="one pod")
    scale = await place.get(kube.POOL, "p")
    assert scale is not None
    assert scale["spec"]["replicas"] == 1


async def test_a_budget_sizes_a_pool_until_somebody_scales_it(place: Place) -> None:
    budget = {"sessions": 40, "tokensPerSession": 2048}
    await place.apply("p", replicas=None, kvBudget=budget)

    async def replicas() -> int:
        pool = await place.get(kube.POOL, "p")
        return int((pool or {}).get("spec", {}).get("replicas", 0))

    first = await eventually(replicas, within_s=30, what="spec.replicas is filled")
    await place.apply("p", replicas=None, kvBudget={**budget, "sessions": 4000})

    async def grown() -> bool:
        return await replicas() > first

    await eventually(grown, within_s=30, what="a larger budget asks for more")
    await place.kubectl("scale", f"{POOLS}/p", "--replicas=1")
    await place.until("p", "Sized", "True")
    await place.apply("p", replicas=None, kvBudget={**budget, "sessions": 8000})

    async def told() -> bool:
        pool = await place.get(kube.POOL, "p")
        return pool is not None and pool["status"]["observedGeneration"] == pool["metadata"]["generation"]

    await eventually(told, what="the new budget was seen")
    assert await replicas() == 1
    pool = await place.get(kube.POOL, "p")
    assert pool is not None
    assert "kubectl" in pool["status"]["replicasManagedBy"]


async def test_a_horizontal_pod_autoscaler_is_respected(place: Place) -> None:
    """One broken pod does not hold it up: no pod of this pool ever gets ready."""
    await place.apply("p", replicas=None, kvBudget={"residentTokens": 1000})
    await place.until_replicas("p", 1, within_s=30)
    aim = {"apiVersion": kube.POOL.api_version, "kind": kube.POOL.kind, "name": "p"}
    scaler = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler"}
    meta = {"name": "p", "namespace": place.namespace}
    place.api.apply({**scaler, "metadata": meta, "spec": {"scaleTargetRef": aim, "minReplicas": 3, "maxReplicas": 5}})
    await place.until_replicas("p", 3, within_s=60)
    pool = await place.get(kube.POOL, "p")
    assert pool is not None
    assert (pool["spec"]["replicas"], pool["status"]["replicasManagedBy"]) == (3, "kube-controller-manager")


async def test_a_name_that_is_taken_is_left_alone_and_told(place: Place) -> None:
    theirs = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "p", "namespace": place.namespace}}
    place.api.apply({**theirs, "spec": {"selector": {"app": "theirs"}, "ports": [{"port": 80}]}})
    await place.apply("p")
    message = await place.until("p", "Accepted", "False", "NameTaken")
    assert "Service p" in message
    service = await place.get(SERVICE, "p")
    assert service is not None
    assert service["spec"]["selector"] == {"app": "theirs"}
    await place.kubectl("delete", "service/p")
    await place.until("p", "Accepted", "True", within_s=2 * RESYNC_S)


async def test_what_a_person_sees(place: Place) -> None:
    await place.apply("p")
    await place.serve("p", replicas=2)
    assert "True" in await place.kubectl("get", "ppool")
    described = await place.kubectl("describe", f"{POOLS}/p")
    assert "Available" in described
    events = await place.client.list_all(kube.EVENT, place.namespace)
    ours = [one for one in events if one["involvedObject"]["kind"] == "InferencePool"]
    assert ours
    assert all(one.get("count", 1) == 1 for one in ours), "each thing is said once"


async def test_an_idle_pool_causes_no_writes(place: Place, cluster: tuple[ApiServer, KubeClient, OperatorProgram]) -> None:
    api, _, operator = cluster
    await place.apply("p")
    await place.serve("p", replicas=2)
    await place.until("p", "Progressing", "False")
    await asyncio.sleep(RESYNC_S)  # a first resync still finds what just happened
    since_bytes, looks = api.audit_log.stat().st_size, await operator.figure("reconciles_total")
    await asyncio.sleep(5 * RESYNC_S)
    writes = [one for one in api.asked(since_bytes) if one.writes and one.user.username == USER]
    assert [one for one in writes if one.object_ref.resource != "leases"] == []
    assert writes, "the Lease is renewed"
    lists = [one for one in api.asked(since_bytes) if one.user.username == USER and one.verb == "list"]
    assert lists, "resyncs went on"
    print(f"idle for {5 * RESYNC_S} s: {await operator.figure('reconciles_total') - looks:g} looks, {len(lists)} lists")
