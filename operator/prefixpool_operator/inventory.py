"""What accelerators there are: from the labels that GPU Feature Discovery puts on nodes, or from ResourceSlices (DRA).

Both are optional rights. Without them sizes must stand in the pool's spec, and the plan says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from prefixpool_operator.kube import NODE, RESOURCE_SLICE, ForbiddenError, KubeApi, NotFoundError, Resource
from prefixpool_operator.observed import Node, Raw
from prefixpool_operator.resource_slices import Device, devices_of, whole_units

_log = logging.getLogger(__name__)

_MIB: Final = 1 << 20
_MEMORY: Final = "nvidia.com/gpu.memory"  # MiB of one device, or of one MIG slice where all slices are alike
_PRODUCT: Final = "nvidia.com/gpu.product"
WHOLE: Final = "nvidia.com/gpu"
_PART: Final = "nvidia.com/mig-"  # resources of slices where those of a node are unlike, with labels of their own
_REPLICAS: Final = "nvidia.com/gpu.replicas"  # above 1: devices are handed out several times over
_SHARED: Final = "-SHARED"  # the product's ending where the device plugin shares devices and keeps the resource's name


class Inventory(Protocol):
    """Where accelerators' figures come from."""

    async def nodes(self) -> tuple[Node, ...] | None:
        """None: the operator may not look. Raises KubeError."""
        ...


class ClusterInventory:
    """Nodes and ResourceSlices, read at most once in `fresh_s`: clusters have thousands, and they seldom change."""

    def __init__(self, api: KubeApi, *, fresh_s: float, clock: Callable[[], float]) -> None:
        self._api = api
        self._fresh_s = fresh_s
        self._clock = clock
        self._read_at: float | None = None
        self._nodes: tuple[Node, ...] | None = None
        self._reading = asyncio.Lock()

    async def nodes(self) -> tuple[Node, ...] | None:
        async with self._reading:  # by one pool for all: a large cluster's nodes are many megabytes
            if self._read_at is None or self._clock() - self._read_at > self._fresh_s:
                self._nodes = await self._read()
                self._read_at = self._clock()
            return self._nodes

    async def _read(self) -> tuple[Node, ...] | None:
        nodes = await self._allowed(NODE)
        if nodes is None:
            return None
        devices = devices_of(await self._allowed(RESOURCE_SLICE) or ())
        return tuple(node_of(raw, devices.get(raw["metadata"]["name"], ())) for raw in nodes)

    async def _allowed(self, resource: Resource) -> list[Raw] | None:
        try:
            return await self._api.list_all(resource)
        except (ForbiddenError, NotFoundError) as error:  # no right, or a cluster older than this kind
            if self._read_at is None:
                _log.info("not read for sizing", extra={"kind": resource.kind, "why": str(error)})
            return None


def node_of(raw: Raw, devices: Sequence[Device]) -> Node:
    """Labels win over slices. Of unlike devices the smallest counts: a pod may get any."""
    labels: Mapping[str, str] = raw["metadata"].get("labels") or {}
    product, memory_bytes = labels.get(_PRODUCT, ""), _whole(labels.get(_MEMORY, "")) * _MIB
    known = [device for device in devices if device.memory_bytes]
    if not memory_bytes and known:
        smallest = min(known, key=lambda device: device.memory_bytes)
        product, memory_bytes = smallest.product, smallest.memory_bytes
    status = raw.get("status") or {}
    return Node(
        name=raw["metadata"]["name"],
        ready=any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or ()),
        labels=labels,
        allocatable=_allocatable(status.get("allocatable") or {}, devices),
        accelerator=product.removesuffix(_SHARED),
        accelerator_bytes=memory_bytes,
        parts=_parts(labels),
        shared=_whole(labels.get(_REPLICAS, "")) > 1 or product.endswith(_SHARED),
    )


def _allocatable(told: Mapping[str, object], devices: Sequence[Device]) -> Mapping[str, int]:
    """A kubelet does not tell of devices that a DRA driver hands out for the resource's name (KEP-5004)."""
    by_kubelet = {name: whole_units(value) for name, value in told.items()}
    by_drivers = Counter(device.resource for device in devices)
    return {**by_drivers, **{name: count for name, count in by_kubelet.items() if count or name not in by_drivers}}


def _parts(labels: Mapping[str, str]) -> Mapping[str, int]:
    """The other labels are of the whole device."""
    resources = {label.removesuffix(".memory") for label in labels if label.startswith(_PART) and label.endswith(".memory")}
    return {
        one: _whole(labels[f"{one}.memory"]) * _MIB
        for one in sorted(resources)
        if _whole(labels.get(f"{one}.replicas", "")) < 2
    }


def is_part(resource: str) -> bool:
    """Whether it is a slice of a device."""
    return resource.startswith(_PART)


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0
