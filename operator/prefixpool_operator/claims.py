"""Disks of replicas: a StatefulSet's claim templates cannot change, and a claim can grow but never shrink."""

from __future__ import annotations

import msgspec

from prefixpool.api.quantity import Bytes
from prefixpool.api.status import Reason
from prefixpool.sizing.reasons import gib
from prefixpool_operator.observed import Raw
from prefixpool_operator.troubles import Trouble


class Claims(msgspec.Struct, frozen=True, kw_only=True):
    """Templates for the StatefulSet. `hold`: its present ones must stay, and with them its pod template."""

    templates: list[Raw]
    hold: bool = False
    troubles: tuple[Trouble, ...] = ()


def settle(wanted: list[Raw], stateful: Raw | None, claims: tuple[Raw, ...]) -> Claims:
    """`claims` are the pool's PersistentVolumeClaims."""
    if stateful is None:
        return Claims(templates=wanted, troubles=_of_claims(wanted, claims))
    present = stateful["spec"].get("volumeClaimTemplates") or []
    if _facts(present) == _facts(wanted):
        return Claims(templates=wanted, troubles=_of_claims(wanted, claims))
    name = stateful["metadata"]["name"]
    message = (
        f"spec.kvCache.disk asks for {_words(wanted)}, and the StatefulSet {name} was made with {_words(present)}, which "
        "cannot be changed in place; until then pods stay as they are. "
        f"`kubectl delete statefulset {name} --cascade=orphan` leaves all pods running, "
        "and the operator makes it anew; or set the former size again"
    )
    return Claims(templates=present, hold=True, troubles=(Trouble(reason=Reason.CLAIM_CANNOT_SHRINK, message=message),))


def _of_claims(wanted: list[Raw], claims: tuple[Raw, ...]) -> tuple[Trouble, ...]:
    """Claims that are older than the size that is wanted now."""
    size = next((_size(one) for one in wanted), 0)
    smaller = sorted(one["metadata"]["name"] for one in claims if 0 < _size(one) < size)
    larger = sorted(one["metadata"]["name"] for one in claims if _size(one) > size > 0)
    found = []
    if smaller:
        message = (
            f"spec.kvCache.disk needs claims of {gib(size)}, and these are smaller. Where the StorageClass allows it, raise "
            "their spec.resources.requests.storage; else delete each claim and its pod, one after the other"
        )
        found.append(Trouble(reason=Reason.CLAIM_CANNOT_SHRINK, message=message, pods=tuple(smaller)))
    if larger:
        message = (
            f"spec.kvCache.disk needs claims of {gib(size)}, and these are larger: a claim cannot shrink. They go on being "
            "used; to get their space back, delete each claim and its pod, one after the other"
        )
        found.append(Trouble(reason=Reason.CLAIM_CANNOT_SHRINK, message=message, pods=tuple(larger)))
    return tuple(found)


def _facts(templates: list[Raw]) -> list[tuple[str, str, int]]:
    return [(one["metadata"]["name"], one["spec"].get("storageClassName") or "", _size(one)) for one in templates]


def _size(claim: Raw) -> int:
    """0: unknown. People may write quantities that we do not, such as 1e9."""
    asked = ((claim.get("spec") or {}).get("resources") or {}).get("requests") or {}
    try:
        return Bytes.parse(asked.get("storage"))
    except ValueError:
        return 0


def _words(templates: list[Raw]) -> str:
    return ", ".join(f"a claim of {gib(_size(one))}" for one in templates) or "no claim"
