"""Devices of nodes, as their drivers publish them for dynamic resource allocation (DRA, resource.k8s.io/v1).

A pod that asks for `nvidia.com/gpu` gets one of them where the driver's DeviceClass bears that resource's name (KEP-5004:
Kubernetes 1.36, and 1.34 behind a gate). Which devices a class means stands in CEL, which is not read here. What vendors do
is: driver `gpu.nvidia.com`, resource `nvidia.com/gpu`, whole devices only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from prefixpool.api.quantity import Bytes
from prefixpool_operator.observed import Raw

# Attribute "type" of a whole device, of drivers of NVIDIA and AMD. Others are parts ("mig", "amdgpu-partition"), offered
# beside the device that they would be cut from, and devices for virtual machines ("vfio").
_WHOLE: Final = frozenset({"", "gpu", "amdgpu"})


class Device(NamedTuple):
    """One that a pod can have for itself. `memory_bytes` 0: the driver does not know."""

    resource: str  # by which pods ask for it, such as nvidia.com/gpu
    product: str
    memory_bytes: int


def devices_of(slices: Sequence[Raw]) -> Mapping[str, list[Device]]:
    """Node → its whole devices. Those without a driver of the form `gpu.VENDOR`, or without memory, are no accelerators."""
    found: dict[str, list[Device]] = defaultdict(list)
    for spec in _current([raw.get("spec") or {} for raw in slices]):
        name, _, vendor = str(spec.get("driver", "")).partition(".")
        if spec.get("nodeName") and vendor:
            found[spec["nodeName"]] += _accelerators(spec, f"{vendor}/{name}")
    return found


def _accelerators(spec: Raw, resource: str) -> Iterator[Device]:
    for device in spec.get("devices") or ():
        attributes, memory = device.get("attributes") or {}, (device.get("capacity") or {}).get("memory")
        if memory and _text(attributes, "type") in _WHOLE:
            yield Device(resource, _text(attributes, "productName"), whole_units(memory.get("value")))


def _current(specs: Sequence[Raw]) -> Iterator[Raw]:
    """While a driver publishes a pool of devices anew, slices of its last generation still stand beside the new ones."""
    newest: dict[tuple[Any, Any], int] = {}
    for spec in specs:
        newest[_pool(spec)] = max(_generation(spec), newest.get(_pool(spec), 0))
    return (spec for spec in specs if _generation(spec) == newest[_pool(spec)])


def _pool(spec: Raw) -> tuple[Any, Any]:
    return spec.get("driver"), (spec.get("pool") or {}).get("name")


def _generation(spec: Raw) -> int:
    return int((spec.get("pool") or {}).get("generation") or 0)


def _text(attributes: Mapping[str, Any], name: str) -> str:
    return str((attributes.get(name) or {}).get("string", ""))


def whole_units(quantity: object) -> int:
    """Whole units, rounded down for thousandths (cpu: 15900m is 15). 0 for what is no quantity."""
    text = str(quantity)
    try:
        return int(text.removesuffix("m")) // 1000 if text.endswith("m") else int(Bytes.parse(text))
    except ValueError:
        return 0
