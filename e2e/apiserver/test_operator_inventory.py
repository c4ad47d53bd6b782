"""Pools are sized by the accelerators that a cluster has: what nodes are labelled with, and what DRA drivers publish."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import pytest
import pytest_asyncio

from prefixpool_operator import kube
from prefixpool_operator.kube_client import KubeClient
from prefixpool_operator.observed import Raw
from prefixpool_testing.cluster.api_server import ApiServer
from prefixpool_testing.operated import Place, operated

pytestmark = pytest.mark.asyncio(loop_scope="module")

LLAMA: Final[dict[str, Any]] = {
    "model": {"source": "meta-llama/Llama-3.1-8B-Instruct"},
    "engine": {"kind": "vllm", "maxModelLen": 8192},
    "accelerator": {"resource": "nvidia.com/gpu"},
    "replicas": 1,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(api: ApiServer) -> AsyncIterator[KubeClient]:
    """Nodes with labels, with slices, and with nothing but a device plugin; each pool is placed on one of them."""
    make_node(api, "labelled", {"nvidia.com/gpu.memory": "81559", "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}, gpus=8)
    make_node(api, "sliced")
    make_node(api, "bare", gpus=1)
    api.apply(h200s("sliced"))
    async with operated(api, "--resync-s", "5") as (client, _):
        yield client


def make_node(api: ApiServer, name: str, labels: Mapping[str, str] | None = None, *, gpus: int = 0) -> None:
    """`labels`: of GPU Feature Discovery. `gpus`: that a device plugin offers."""
    meta = {"name": name, "labels": {"gpus": name, **(labels or {})}}
    api.apply({"apiVersion": "v1", "kind": "Node", "metadata": meta})
    offered = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    status = {"status": {"capacity": offered, "allocatable": offered}}
    api.kubectl("patch", "node", name, "--subresource=status", "-p", json.dumps(status))


def h200s(node: str) -> Raw:
    """As NVIDIA's DRA driver publishes two devices, and a part that it could cut from one of them."""
    kinds = {"gpu-0": ("gpu", "143771Mi"), "gpu-1": ("gpu", "143771Mi"), "gpu-0-mig-19-0-1": ("mig", "16Gi")}
    devices = [
        {
            "name": name,
            "attributes": {"type": {"string": kind}, "productName": {"string": "NVIDIA H200"}},
            "capacity": {"memory": {"value": memory}},
        }
        for name, (kind, memory) in kinds.items()
    ]
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    return {
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": f"{node}-gpu.nvidia.com"},
        "spec": {"driver": "gpu.nvidia.com", "nodeName": node, "pool": pool, "devices": devices},
    }  # fmt: skip


async def held(place: Place, name: str) -> Raw:
    """What the devices of one replica hold."""
    await place.until(name, "Sized", "True")
    pool = await place.get(kube.POOL, name)
    assert pool is not None
    return dict(pool["status"]["sizing"]["devicePerReplica"])


@pytest.mark.parametrize(
    ("node", "memory_bytes", "tensor_parallel"), [("labelled", 81559 << 20, 8), ("sliced", 143771 << 20, 2)]
)
async def test_a_pool_is_sized_by_what_its_nodes_have(
    place: Place, node: str, memory_bytes: int, tensor_parallel: int
) -> None:
    where = {"nodeSelector": {"gpus": node}}
    await place.apply("found", **LLAMA, placement=where)
    said = {**LLAMA, "accelerator": {"resource": "nvidia.com/gpu", "memory": str(memory_bytes)}}
    await place.apply("said", **said, placement=where)
    assert await held(place, "found") == await held(place, "said")
    more = {**LLAMA, "accelerator": {"resource": "nvidia.com/gpu", "tensorParallel": tensor_parallel + 1}}
    await place.apply("too-wide", **more, placement=where)
    message = await place.until("too-wide", "Sized", "Unknown", "DeviceUnknown")
    assert f"offers {tensor_parallel + 1} nvidia.com/gpu" in message


async def test_a_driver_that_comes_later_is_found(place: Place) -> None:
    await place.apply("p", **LLAMA, placement={"nodeSelector": {"gpus": "bare"}})
    assert "ResourceSlices" in await place.until("p", "Sized", "Unknown", "DeviceUnknown")
    await asyncio.to_thread(place.api.apply, h200s("bare"))
    await place.until("p", "Sized", "True", within_s=60)
