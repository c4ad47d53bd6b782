"""Accelerators of nodes, from labels and from ResourceSlices."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from prefixpool_operator import kube
from prefixpool_operator.inventory import ClusterInventory
from prefixpool_operator.kube import ForbiddenError, NotFoundError
from prefixpool_operator.observed import Node, Raw
from prefixpool_testing.fake_kube import FakeKube

GIB = 1 << 30


def put_node(api: FakeKube, name: str, labels: dict[str, str], ready: str = "True", **allocatable: str) -> None:
    conditions = [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": ready}]
    status = {"conditions": conditions, "allocatable": allocatable}
    api.put(kube.NODE, name, namespace="", metadata={"labels": labels}, status=status)


def gpu(size: str, kind: str = "gpu") -> Raw:
    attributes = {"type": {"string": kind}, "productName": {"string": "H200"}}
    return {"name": "gpu", "attributes": attributes, "capacity": {"memory": {"value": size}}}


def put_slice(api: FakeKube, node: str, *devices: Raw, driver: str = "gpu.nvidia.com", generation: int = 1) -> None:
    pool = {"name": node, "generation": generation, "resourceSliceCount": 1}
    spec = {"driver": driver, "nodeName": node, "pool": pool, "devices": list(devices)}
    api.put(kube.RESOURCE_SLICE, f"{node}-{driver}-{generation}", namespace="", spec=spec)


async def only(api: FakeKube) -> Node:
    nodes = await ClusterInventory(api, fresh_s=60, clock=lambda: 0).nodes()
    assert nodes is not None
    (node,) = nodes
    return node


async def test_labels_of_gpu_feature_discovery() -> None:
    api = FakeKube()
    labels = {"nvidia.com/gpu.memory": "39538", "nvidia.com/gpu.product": "A100-SXM4-40GB", "nvidia.com/gpu.replicas": "1"}
    put_node(api, "n", labels, **{"cpu": "15900m", "memory": "64Gi", "nvidia.com/gpu": "8"})
    node = await only(api)
    assert (node.accelerator, node.accelerator_bytes) == ("A100-SXM4-40GB", 39538 << 20)
    assert node.ready
    assert not node.shared
    assert node.allocatable == {"cpu": 15, "memory": 64 * GIB, "nvidia.com/gpu": 8}


@pytest.mark.parametrize(
    "labels", [{"nvidia.com/gpu.replicas": "4"}, {"nvidia.com/gpu.product": "Tesla-T4-SHARED"}], ids=["replicas", "name"]
)
async def test_time_sliced_devices_are_marked(labels: dict[str, str]) -> None:
    api = FakeKube()
    put_node(api, "n", {"nvidia.com/gpu.memory": "15360", "nvidia.com/gpu.product": "Tesla-T4", **labels})
    node = await only(api)
    assert node.shared
    assert node.accelerator == "Tesla-T4"


async def test_resource_slices_tell_where_no_label_does() -> None:
    api = FakeKube()
    put_node(api, "n", {}, ready="Unknown")
    put_slice(api, "n", gpu("141Gi"), gpu("140Gi"))
    node = await only(api)
    assert (node.accelerator, node.accelerator_bytes) == ("H200", 140 * GIB)
    assert not node.ready


async def test_a_pool_on_devices_of_resource_slices_was_never_sized() -> None:
    """Their memory was of a type that cannot be written down with the plan."""
    api = FakeKube()
    put_node(api, "n", {})
    put_slice(api, "n", gpu("141Gi"))
    assert msgspec.json.decode(msgspec.json.encode(await only(api)), type=Node) == await only(api)


async def test_devices_that_only_a_dra_driver_tells_of_are_offered_by_their_node() -> None:
    """Without a device plugin a node's allocatable has none, although pods that ask for them are placed there."""
    api = FakeKube()
    put_node(api, "n", {}, **{"cpu": "8", "nvidia.com/gpu": "0"})
    put_slice(api, "n", gpu("141Gi"), gpu("141Gi"))
    put_slice(api, "n", {"name": "channel-0"}, driver="compute-domain.nvidia.com")
    assert (await only(api)).allocatable == {"cpu": 8, "nvidia.com/gpu": 2}


async def test_what_a_device_plugin_offers_is_not_counted_from_slices() -> None:
    api = FakeKube()
    put_node(api, "n", {}, **{"nvidia.com/gpu": "1"})
    put_slice(api, "n", gpu("141Gi"), gpu("141Gi"))
    assert (await only(api)).allocatable == {"nvidia.com/gpu": 1}


@pytest.mark.parametrize("part", ["mig", "vfio"])
async def test_parts_of_a_device_that_a_driver_could_cut_are_not_taken_for_devices(part: str) -> None:
    api = FakeKube()
    put_node(api, "n", {})
    put_slice(api, "n", gpu("141Gi"), gpu("18Gi", part))
    node = await only(api)
    assert node.accelerator_bytes == 141 * GIB
    assert node.allocatable == {"nvidia.com/gpu": 1}


async def test_slices_of_an_earlier_generation_are_not_counted_once_more() -> None:
    api = FakeKube()
    put_node(api, "n", {})
    put_slice(api, "n", gpu("80Gi"), generation=9)
    put_slice(api, "n", gpu("141Gi"), gpu("141Gi"), generation=10)
    node = await only(api)
    assert node.accelerator_bytes == 141 * GIB
    assert node.allocatable == {"nvidia.com/gpu": 2}


async def test_a_device_whose_memory_its_driver_could_not_read() -> None:
    api = FakeKube()
    put_node(api, "n", {})
    put_slice(api, "n", gpu("0", "amdgpu"), gpu("192Gi", "amdgpu"), driver="gpu.amd.com")
    node = await only(api)
    assert node.accelerator_bytes == 192 * GIB
    assert node.allocatable == {"amd.com/gpu": 2}


@pytest.mark.parametrize("wrong", ["", "-1", "many", "39538Mi"])
async def test_a_label_that_is_no_number_is_unknown(wrong: str) -> None:
    api = FakeKube()
    put_node(api, "n", {"nvidia.com/gpu.memory": wrong}, cpu="what")
    node = await only(api)
    assert node.accelerator_bytes == 0
    assert node.allocatable == {"cpu": 0}


async def test_without_the_right_to_list_nodes_nothing_is_claimed() -> None:
    api = FakeKube()
    put_node(api, "n", {})
    api.fail = lambda verb, kind, name: ForbiddenError("no right")
    assert await ClusterInventory(api, fresh_s=60, clock=lambda: 0).nodes() is None


async def test_clusters_older_than_resource_slices() -> None:
    api = FakeKube()
    put_node(api, "n", {})
    api.fail = lambda verb, kind, name: NotFoundError("no such kind") if kind == "ResourceSlice" else None
    assert (await only(api)).accelerator_bytes == 0


@pytest.mark.looptime(start=0)
async def test_nodes_are_read_once_in_a_while() -> None:
    api = FakeKube()
    clock: Any = asyncio.get_running_loop().time
    inventory = ClusterInventory(api, fresh_s=60, clock=clock)
    for _ in range(100):
        await inventory.nodes()
    assert api.calls.count(("list", "Node", "")) == 1
    await asyncio.sleep(61)
    await inventory.nodes()
    assert api.calls.count(("list", "Node", "")) == 2


async def test_pools_that_ask_at_once_do_not_list_all_nodes_each() -> None:
    class Slow(FakeKube):
        async def list_all(self, *what: Any, **how: Any) -> list[Raw]:
            await asyncio.sleep(0)
            return await super().list_all(*what, **how)

    api = Slow()
    put_node(api, "n", {})
    inventory = ClusterInventory(api, fresh_s=60, clock=lambda: 0)
    await asyncio.gather(*(inventory.nodes() for _ in range(16)))
    assert api.calls.count(("list", "Node", "")) == 1


async def test_slices_of_unlike_sizes_have_figures_of_their_own() -> None:
    api = FakeKube()
    labels = {
        "nvidia.com/gpu.memory": "40537", "nvidia.com/gpu.product": "A100-SXM4-40GB", "nvidia.com/mig-1g.5gb.memory": "4864",
        "nvidia.com/mig-1g.5gb.replicas": "1", "nvidia.com/mig-2g.10gb.memory": "9984",
        "nvidia.com/mig-2g.10gb.replicas": "2",
    }  # fmt: skip
    put_node(api, "n", labels)
    node = await only(api)
    assert node.accelerator_bytes == 40537 << 20
    assert node.parts == {"nvidia.com/mig-1g.5gb": 4864 << 20}, "what is shared is not one pod's own"
