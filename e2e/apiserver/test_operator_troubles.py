"""What a real API server refuses reaches a person, with the rights that the project ships."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from prefixpool_operator import kube
from prefixpool_operator.kube_client import KubeClient
from prefixpool_operator.troubles import LOOK_S, STUCK_S
from prefixpool_testing.cluster.api_server import ApiServer
from prefixpool_testing.eventually import eventually
from prefixpool_testing.operated import Place, operated

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(api: ApiServer) -> AsyncIterator[KubeClient]:
    async with operated(api, "--resync-s", "5") as (client, _):
        yield client


async def test_a_quota_with_room_for_one_replica(place: Place) -> None:
    await place.kubectl("create", "quota", "team", "--hard=pods=1")
    await place.apply("p", replicas=2)
    message = await place.until("p", "Degraded", "True", "PodRefused", within_s=2 * LOOK_S)
    assert "exceeded quota: team" in message
    await place.kubectl("delete", "quota/team")
    await place.serve("p", replicas=2)
    await place.until("p", "Degraded", "False", "Healthy")


async def test_a_runtime_class_that_is_not_there_yet(place: Place) -> None:
    name = f"devices-of-{place.namespace}"
    await place.apply("p", replicas=1, placement={"runtimeClassName": name})
    message = await place.until("p", "Degraded", "True", "PodRefused", within_s=2 * LOOK_S)
    assert f'RuntimeClass "{name}" not found' in message
    runtime = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": name}, "handler": "nvidia"}
    place.api.apply(runtime)
    await place.serve("p", replicas=1)
    await place.until("p", "Degraded", "False", "Healthy")
    assert [pod["spec"]["runtimeClassName"] for pod in await place.pods("p")] == [name]


async def test_a_child_that_the_api_server_does_not_take(place: Place) -> None:
    await place.apply("p", placement={"affinity": {"nodeAffinity": 7}})
    message = await place.until("p", "Degraded", "True", "WriteRefused")
    assert "nodeAffinity" in message
    await place.apply("p")
    await place.serve("p", replicas=2)
    await place.until("p", "Degraded", "False", "Healthy")


async def test_pods_that_do_not_end_for_a_dead_node_and_for_a_finalizer(place: Place) -> None:
    place.api.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "lost"}})
    await place.apply("p", replicas=2)
    await place.serve("p", replicas=2)
    target = {"kind": "Node", "name": "lost"}
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "p-0"}, "target": target}
    path = f"/api/v1/namespaces/{place.namespace}/pods/p-0/binding"
    await asyncio.to_thread(place.api.kubectl, "create", "--raw", path, "-f", "-", stdin=json.dumps(binding))
    await place.kubectl("patch", "pod/p-1", "--type=merge", "-p", '{"metadata":{"finalizers":["example.com/kept"]}}')
    for name in ("p-1", "p-0"):
        await place.client.delete(kube.POD, place.namespace, name, grace_s=1)
    message = await place.until("p", "Degraded", "True", "NodeLost", within_s=STUCK_S + 30)
    assert "kubectl taint node lost node.kubernetes.io/out-of-service" in message
    assert "p-1: should have ended and has not" in message
    await place.kubectl("delete", "pod/p-0", "--force", "--grace-period=0")
    await place.kubectl("patch", "pod/p-1", "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
    await place.serve("p", replicas=2)
    await place.until("p", "Degraded", "False", "Healthy")


@pytest.mark.timeout(
    300
)  # orphans are made by the garbage collector, which rests for a minute and more when CRDs came or went
async def test_a_disk_that_cannot_shrink(place: Place) -> None:
    def cache(size: str) -> dict[str, Any]:
        return {"host": {"memory": "1Gi"}, "disk": {"size": size, "storageClassName": "local"}}

    await place.apply("p", kvCache=cache("20Gi"))
    await place.serve("p", replicas=2)
    uids = {pod["metadata"]["uid"] for pod in await place.pods("p")}
    await place.apply("p", kvCache=cache("10Gi"))
    message = await place.until("p", "Degraded", "True", "ClaimCannotShrink")
    assert "kubectl delete statefulset p --cascade=orphan" in message
    await place.kubectl("delete", "statefulset/p", "--cascade=orphan")
    message = await place.until("p", "Progressing", "True", "RollingOut")
    await place.serve("p", replicas=2)
    told = await place.until("p", "Degraded", "True", "ClaimCannotShrink")
    assert "disk-p-0, disk-p-1" in told
    assert "a claim cannot shrink" in told
    assert uids & {pod["metadata"]["uid"] for pod in await place.pods("p")}, "not all at once"


async def test_a_secret_with_the_name_of_the_pools_keys(place: Place) -> None:
    await place.kubectl("create", "secret", "generic", "p-keys", "--from-literal=engine=theirs")
    await place.apply("p")
    assert "Secret p-keys" in await place.until("p", "Accepted", "False", "NameTaken")
    assert await place.pods("p") == []
    await place.kubectl("delete", "secret/p-keys")
    await place.until("p", "Accepted", "True", within_s=60)
    secret = await place.get(kube.SECRET, "p-keys")
    assert secret is not None
    assert secret["data"].keys() == {"engine", "salt"}


async def test_an_inspection_whose_pod_may_not_be_made(place: Place) -> None:
    await place.kubectl("create", "quota", "team", "--hard=pods=0")
    await place.apply("p", model={"source": "someone/unheard-of"}, engine={"kind": "vllm"})
    await place.until("p", "Sized", "Unknown", "Inspecting")

    async def told() -> bool:
        return "exceeded quota: team" in (await place.condition("p", "Sized"))[2]

    await eventually(told, within_s=2 * LOOK_S, what="the quota is told")
