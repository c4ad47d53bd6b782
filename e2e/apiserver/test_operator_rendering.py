"""What `plan()` renders, on a real API server: accepted as it is, admitted by the restricted profile, and stable.

Stable: what the server makes of an object (defaults, other spellings, fields left out) is no foreign edit of it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio

from prefixpool_operator import kube
from prefixpool_operator.actions import FIELD_MANAGER, Apply, CreateOnce, Plan
from prefixpool_operator.identity import L_POOL, key_of
from prefixpool_operator.kube_client import KubeClient
from prefixpool_operator.observed import Node, Observed, Raw, Settings
from prefixpool_operator.plan import plan
from prefixpool_testing.cluster.api_server import ApiServer
from prefixpool_testing.cluster.kubectl import RESTRICTED
from prefixpool_testing.eventually import eventually
from prefixpool_testing.operator_program import admin_client

SETTINGS = Settings(worker_image="registry.local/worker:1", router_image="registry.local/router:1", operator_namespace="ops")
KINDS = (*kube.CHILDREN, *kube.RBAC_CHILDREN, kube.SECRET)
GPUS = Node(
    name="n",
    ready=True,
    labels={"zone": "a"},
    allocatable={"nvidia.com/gpu": 8},
    accelerator="NVIDIA-L4",
    accelerator_bytes=22 << 30,
)
CPU = {"resource": "cpu", "memory": "4Gi"}
SMALL = {"model": {"source": "HuggingFaceTB/SmolLM2-135M-Instruct"}, "accelerator": CPU, "replicas": 1}
SPECS: dict[str, Raw] = {
    "sidecars": SMALL,
    "routers apart": {**SMALL, "router": {"mode": "Deployment"}, "replicas": 0},
    "everything": {
        "model": {
            "source": "/models/llama", "servedName": "llama", "volume": {"claimName": "weights"},
            "adapters": [{"name": "tuned", "source": "/models/tuned"}],
            "shape": {
                "weights": "2.5G", "maxModelLen": 8192, "hiddenSize": 2048, "intermediateSize": 8192, "attentionHeads": 32,
                "vocabularySize": 128256, "kv": [{"kind": "full", "layers": 16, "heads": 8, "valuesPerToken": 128}],
            },
        },
        "engine": {
            "image": "registry.local/mine:3", "imagePullSecrets": [{"name": "pull"}], "extraArgs": ["--seed=7"],
            "env": [
                {"name": "EMPTY", "value": ""},
                {"name": "TEXT", "value": "žluť 🐎 \x07\x85\u2028 \\ud83d"},
                {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "mine", "key": "k"}}},
            ],
            "resources": {"requests": {"cpu": "0.5", "memory": "1.5Gi"}, "limits": {"cpu": 2, "memory": "3Gi"}},
        },
        "accelerator": {"tensorParallel": 2},
        "placement": {
            "nodeSelector": {"zone": "a"},
            "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 1, "podAffinityTerm": {"topologyKey": "zone", "labelSelector": {"matchLabels": {"a": "b"}}}}
            ]}},
            "topologySpread": [{"topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}],
            "runtimeClassName": "nvidia",
        },
        "kvCache": {"dtype": "fp8", "host": {"memory": "2Gi"}, "disk": {"size": "5Gi", "storageClassName": "fast"}},
        "router": {"resources": {"limits": {"memory": "512Mi"}}, "limits": {"maxInflight": 9}},
        "auth": {"keysSecret": "clients"},
        "replicas": 1,
    },
    "a disk for all": {**SMALL, "kvCache": {"host": {"memory": "1Gi"}, "disk": {"size": "5Gi", "sharedClaimName": "all"}}},
    "a disk of the node": {**SMALL, "kvCache": {"host": {"memory": "1Gi"}, "disk": {"size": "5Gi"}}},
    "a simulation": {**SMALL, "engine": {"kind": "sim"}},
    "an inspection": {"model": {"source": "someone/unheard-of", "tokenSecret": "hub"}, "accelerator": {}},
}  # fmt: skip


# Pods that name one are refused without it.
RUNTIME: Raw = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "nvidia"}, "handler": "nvidia"}


@pytest_asyncio.fixture
async def client(api: ApiServer) -> AsyncIterator[KubeClient]:
    found = await admin_client(api)
    yield found
    await found.close()


@pytest.fixture
def restricted(api: ApiServer) -> Iterator[str]:
    """A namespace that takes pods of the restricted profile only."""
    name = f"restricted-{uuid4().hex[:8]}"
    api.make_namespaces(name, labels=RESTRICTED)
    api.apply(RUNTIME)
    yield name
    api.kubectl("delete", "namespace", name, "--wait=false")


def pool(namespace: str, spec: Raw) -> Raw:
    meta = {"name": "chat", "namespace": namespace, "uid": str(uuid4()), "generation": 1}
    return {"metadata": meta, "spec": spec}


class Look:
    """Plans, carries out, looks again. The pool itself is on paper: its owner reference would let children be collected."""

    def __init__(self, client: KubeClient, namespace: str, spec: Raw) -> None:
        self.client = client
        self.namespace = namespace
        self.pool = pool(namespace, spec)

    async def children(self) -> dict[tuple[str, str], Raw]:
        lists = [await self.client.list_all(kind, self.namespace, labels=f"{L_POOL}=chat") for kind in KINDS]
        return {key_of(child): child for listed in lists for child in listed}

    async def plan(self) -> Plan:
        children = await self.children()
        owner = {"uid": self.pool["metadata"]["uid"], "controller": True, "apiVersion": "prefixpool.dev/v1alpha1"}
        for child in children.values():
            child["metadata"]["ownerReferences"] = [{**owner, "kind": "InferencePool", "name": "chat"}]
        return plan(Observed(pool=self.pool, children=children, nodes=(GPUS,), now_s=time.time(), settings=SETTINGS))

    async def carry_out(self, found: Plan) -> None:
        for action in found.actions:
            if isinstance(action, Apply | CreateOnce):
                body: dict[str, Any] = {**action.object, "metadata": {**action.object["metadata"], "ownerReferences": []}}
                await self.client.apply(kube.resource_of(body["kind"]), body, manager=FIELD_MANAGER)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
async def test_what_is_rendered_is_accepted_and_stays(client: KubeClient, restricted: str, spec: Raw) -> None:
    look = Look(client, restricted, spec)
    await look.carry_out(await look.plan())
    assert {kind for kind, _ in await look.children()} & {"StatefulSet", "Job"}
    again = await look.plan()
    assert [one.reason for one in again.actions] == []


@pytest.mark.parametrize("name", ["sidecars", "everything", "an inspection"])
async def test_pods_are_admitted_by_the_restricted_profile(client: KubeClient, restricted: str, name: str) -> None:
    look = Look(client, restricted, SPECS[name])
    await look.carry_out(await look.plan())

    async def pods() -> bool:
        return bool(await client.list_all(kube.POD, restricted))

    await eventually(pods, within_s=30, what="a pod is made")


async def test_a_changed_spec_is_accepted_over_the_former_one(client: KubeClient, restricted: str) -> None:
    look = Look(client, restricted, SPECS["everything"])
    await look.carry_out(await look.plan())
    look.pool["spec"] = {**SPECS["everything"], "router": {}, "auth": {}, "engine": {}, "placement": {}}
    await look.carry_out(await look.plan())
    template = (await look.children())["StatefulSet", "chat"]["spec"]["template"]["spec"]
    assert "imagePullSecrets" not in template
    assert "affinity" not in template
    assert not [mount for mount in template["initContainers"][0]["volumeMounts"] if mount["name"] == "auth"]
    again = await look.plan()
    assert [one.reason for one in again.actions if isinstance(one, Apply)] == []
