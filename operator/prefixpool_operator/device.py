"""Which accelerator a pool's pods will get: from its spec, from nodes, or as it was when the pool was planned.

A plan is kept for as long as the spec stays the same: nodes come and go, and a pool that runs must not change its mind.
"""

from __future__ import annotations

import msgspec

from prefixpool.api.sizing import NO_DEVICE, known_device
from prefixpool.api.spec import PoolSpec
from prefixpool.sizing.catalogue import Accelerator
from prefixpool.sizing.reasons import gib
from prefixpool_operator.inventory import is_part
from prefixpool_operator.observed import Node
from prefixpool_operator.remembered import Device, Planned


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """`accelerator`, or why there is none."""

    device: Device = Device()
    accelerator: Accelerator | None = None
    unknown: str = ""


def look(nodes: tuple[Node, ...] | None, before: Planned | None, spec: PoolSpec) -> Found:
    """The device to plan with. `before`: what was planned for the spec as it is."""
    device = before.device if before is not None else _of_nodes(nodes or (), spec)
    accelerator = known_device(spec.accelerator, device.product, device.memory_bytes)
    if accelerator is not None:
        return Found(device=device, accelerator=accelerator)
    return Found(unknown=_why_unknown(nodes, spec))


def _of_nodes(nodes: tuple[Node, ...], spec: PoolSpec) -> Device:
    """Of unlike devices the smallest, because a pod may get any."""
    found = (_device(node, spec.accelerator.resource) for node in _suitable(nodes, spec))
    known = (device for device in found if device.memory_bytes)
    return min(known, key=lambda device: (device.memory_bytes, device.product), default=Device())


def _device(node: Node, resource: str) -> Device:
    if is_part(resource):
        return Device(product=node.accelerator, memory_bytes=node.parts.get(resource, 0))
    return Device(product=node.accelerator, memory_bytes=0 if node.shared else node.accelerator_bytes)


def _suitable(nodes: tuple[Node, ...], spec: PoolSpec) -> list[Node]:
    """With the labels that the pool wants, and devices enough for a replica."""
    selector, wanted = spec.placement.node_selector.items(), spec.accelerator
    return [
        node
        for node in nodes
        if node.allocatable.get(wanted.resource, 0) >= wanted.devices
        and all(node.labels.get(label) == value for label, value in selector)
    ]


def no_room(nodes: tuple[Node, ...] | None, spec: PoolSpec, memory_bytes: int) -> str:
    """Where no node that a replica may run on has so much memory. Not refused: a larger node may be on its way."""
    given = spec.engine.resources
    if given is not None and ("memory" in given.requests or "memory" in given.limits):
        return ""
    largest = max((node.allocatable.get("memory", 0) for node in _suitable(nodes or (), spec)), default=0)
    if not largest or largest >= memory_bytes:
        return ""
    return (
        f" A replica asks for {gib(memory_bytes)} of its node's memory, and the largest node that it may run on has "
        f"{gib(largest)}: lower kvCache.host.memory, set engine.resources, or add larger nodes."
    )


def _why_unknown(nodes: tuple[Node, ...] | None, spec: PoolSpec) -> str:
    wanted = spec.accelerator
    if nodes is None:
        return f"{NO_DEVICE} (the operator may not read nodes)"
    found = _suitable(nodes, spec)
    if not found:
        return f"{NO_DEVICE} (no node that spec.placement.nodeSelector allows offers {wanted.devices} {wanted.resource})"
    if all(node.shared for node in found):
        return f"{NO_DEVICE} ({wanted.resource} is shared between pods, so a pod's part of its memory is not known)"
    return NO_DEVICE
