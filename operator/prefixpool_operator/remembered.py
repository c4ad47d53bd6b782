"""What a pool must not forget, in its ConfigMap: what was inspected, planned for and measured. All can be found anew."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from prefixpool_operator.identity import Identity
from prefixpool_operator.observed import Observed, Raw

T = TypeVar("T")


class Device(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An accelerator as nodes name it."""

    product: str = ""
    memory_bytes: int = 0


class Planned(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Of one spec. `measured_blocks`: the least that an engine reported, the null block included; 0: none yet."""

    spec_hash: str
    device: Device = Device()
    measured_blocks: int = 0


class Inspected(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Of one model at one revision: the document that the Job left."""

    subject: str
    document: str


class Remembered(msgspec.Struct, frozen=True, kw_only=True):
    """Both, as far as there are."""

    planned: Planned | None = None
    inspected: Inspected | None = None

    @classmethod
    def read(cls, observed: Observed, identity: Identity) -> Remembered:
        """What somebody broke is forgotten."""
        data = (observed.children.get(("ConfigMap", identity.config)) or {}).get("data") or {}
        return cls(planned=_decoded(data.get("planned"), Planned), inspected=_decoded(data.get("inspected"), Inspected))

    def of_spec(self, spec_hash: str) -> Planned | None:
        """What was planned for the spec as it is."""
        return self.planned if self.planned is not None and self.planned.spec_hash == spec_hash else None

    def config_map(self, identity: Identity) -> Raw:
        parts = {"planned": self.planned, "inspected": self.inspected}
        data = {name: msgspec.json.encode(part).decode() for name, part in parts.items() if part is not None}
        return identity.object("v1", "ConfigMap", identity.config, data=data)


def _decoded(text: str | None, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(text or "", type=kind)
    except msgspec.DecodeError:
        return None
