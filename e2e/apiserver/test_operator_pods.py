"""Pods as kubelets and nodes tell of them: what is wrong, which pods have it, and what to do; the advice is followed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from prefixpool_operator import kube
from prefixpool_operator.kube_client import KubeClient
from prefixpool_operator.observed import Raw
from prefixpool_operator.troubles import STUCK_S
from prefixpool_testing.cluster.api_server import ApiServer
from prefixpool_testing.eventually import eventually
from prefixpool_testing.operated import Place, operated
from prefixpool_testing.operator_program import ready_status

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG_AGO = "2026-01-01T00:00:00Z"  # so that a recovery ends what is told


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(api: ApiServer) -> AsyncIterator[KubeClient]:
    async with operated(api, "--resync-s", "5") as (client, _):
        yield client


async def say(place: Place, name: str, container: str, **state: Any) -> None:
    """As a kubelet of one container that is not up, while the others are."""
    pod = await place.get(kube.POD, name)
    assert pod is not None
    status = ready_status(pod)
    for one in (*status["containerStatuses"], *status["initContainerStatuses"]):
        if one["name"] == container:
            one.update(ready=False, started=False, **state)
    for condition in status["conditions"]:
        if condition["type"] in ("Ready", "ContainersReady"):
            condition["status"] = "False"
    await place.kubelet.say(pod, status)


@pytest.mark.parametrize(
    ("container", "limit", "advice"),
    [
        ("worker", "3.0 GiB", "raise spec.engine.resources.limits.memory, or lower spec.kvCache.host.memory"),
        ("router", "0.5 GiB", "raise spec.router.resources.limits.memory"),
    ],
)
async def test_a_container_that_was_killed_for_its_memory(place: Place, container: str, limit: str, advice: str) -> None:
    resources = {"engine": {"kind": "sim", "resources": {"limits": {"memory": "3Gi"}}}}
    await place.apply("p", **resources, router={"resources": {"limits": {"memory": "536870912"}}})
    await place.serve("p", replicas=2)
    killed = {"terminated": {"reason": "OOMKilled", "exitCode": 137, "startedAt": LONG_AGO, "finishedAt": LONG_AGO}}
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}}
    await say(place, "p-1", container, restartCount=4, state=waiting, lastState=killed)
    message = await place.until("p", "Degraded", "True", "OutOfMemory")
    assert message.startswith(f"p-1: {container} was killed for using more memory than its limit of {limit}: {advice}")
    await place.serve("p", replicas=2)
    await place.until("p", "Degraded", "False", "Healthy")


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("ErrImagePull", 'failed to resolve "worker:1": not found'),
        ("ImagePullBackOff", 'Back-off pulling image "worker:1": ErrImagePull: pull access denied'),
        ("InvalidImageName", "couldn't parse image name"),
        ("ErrImageNeverPull", 'Container image "worker:1" is not present with pull policy of Never'),
    ],
)
async def test_an_image_that_cannot_be_had(place: Place, reason: str, said: str) -> None:
    await place.apply("p")
    await place.serve("p", replicas=2)
    await say(place, "p-0", "worker", state={"waiting": {"reason": reason, "message": said}})
    message = await place.until("p", "Degraded", "True", "ImageUnavailable")
    assert message.startswith(f"p-0: image worker:1 cannot be had: {said.split('ErrImagePull: ')[-1]}")
    await place.serve("p", replicas=2)
    await place.until("p", "Degraded", "False", "Healthy")


async def test_a_container_whose_secret_is_missing(place: Place) -> None:
    await place.apply("p")
    await place.serve("p", replicas=2)
    waiting = {"reason": "CreateContainerConfigError", "message": 'secret "hub" not found'}
    await say(place, "p-0", "worker", state={"waiting": waiting})
    assert 'secret "hub" not found' in await place.until("p", "Degraded", "True", "SecretMissing")


async def test_a_node_that_dies_with_a_pod_on_it(place: Place) -> None:
    """Then the advice is followed, and Kubernetes replaces the pod."""
    await on_a_node(place, "p", "p-0", "dies")
    tell_ready(place, "dies", "Unknown")
    await say(place, "p-0", "worker")
    message = await place.until("p", "Degraded", "True", "NodeLost")
    assert message.startswith("p-0: node dies is not ready; Kubernetes evicts its pods after 5 minutes")
    pod = await place.get(kube.POD, "p-0")
    assert pod is not None
    await place.client.delete(kube.POD, place.namespace, "p-0", grace_s=1)
    message = ""

    async def stuck() -> bool:
        nonlocal message
        message = (await place.condition("p", "Degraded"))[2]
        return "cannot end, because node dies is not ready" in message

    await eventually(stuck, within_s=STUCK_S + 30, what="it is told that the pod does not end")
    advice = "kubectl taint node dies node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    assert f"`{advice}`" in message
    await place.kubectl(*advice.split()[1:])

    async def replaced() -> bool:
        now = await place.get(kube.POD, "p-0")
        return now is not None and now["metadata"]["uid"] != pod["metadata"]["uid"]

    await eventually(replaced, within_s=60, what="another p-0")
    await place.serve("p", replicas=2)
    await place.until("p", "Degraded", "False", "Healthy")


async def test_a_node_that_is_gone_with_a_pod_on_it(place: Place) -> None:
    await on_a_node(place, "p", "p-1", "goes")
    await place.kubectl("delete", "node/goes")
    await say(place, "p-1", "worker")
    assert "p-1: node goes is not ready" in await place.until("p", "Degraded", "True", "NodeLost")


async def test_a_node_that_comes_back(place: Place) -> None:
    await on_a_node(place, "p", "p-0", "sways")
    tell_ready(place, "sways", "False")
    await say(place, "p-0", "worker")
    await place.until("p", "Degraded", "True", "NodeLost")
    tell_ready(place, "sways", "True")
    await place.serve("p", replicas=2)
    await place.until("p", "Degraded", "False", "Healthy")


async def on_a_node(place: Place, pool: str, pod: str, node: str) -> None:
    """A pool that serves, with one pod bound to a node that is ready."""
    place.api.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}})
    tell_ready(place, node, "True")
    await place.apply(pool, replicas=2)
    await place.serve(pool, replicas=2)
    target = {"kind": "Node", "name": node}
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": target}
    path = f"/api/v1/namespaces/{place.namespace}/pods/{pod}/binding"
    await asyncio.to_thread(place.api.kubectl, "create", "--raw", path, "-f", "-", stdin=json.dumps(binding))


def tell_ready(place: Place, node: str, status: str) -> None:
    """What its kubelet, or the node controller, says of a node."""
    condition: Raw = {"type": "Ready", "status": status, "reason": "Told", "message": "by the test"}
    patch = json.dumps({"status": {"conditions": [condition]}})
    place.api.kubectl("patch", f"node/{node}", "--subresource=status", "--type=strategic", "-p", patch)
