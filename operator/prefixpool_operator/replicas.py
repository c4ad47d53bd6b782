"""How many replicas, and who says so.

`spec.replicas` is the scale path. While no other field manager owns it the operator fills it from the budget; once
`kubectl scale`, an autoscaler or a manifest owns it, that wins, until the field is removed from the pool again.
"""

from __future__ import annotations

import msgspec

from prefixpool.api.sizing import budgeted_replicas
from prefixpool.api.spec import PoolSpec
from prefixpool.sizing.plan import SizingPlan
from prefixpool_operator.actions import FIELD_MANAGER, FillReplicas
from prefixpool_operator.observed import Raw


class Replicas(msgspec.Struct, frozen=True, kw_only=True):
    """What is wanted."""

    number: int
    budgeted: int  # what kvBudget asks for; without one, `number`
    owner: str  # FIELD_MANAGER, or another one
    fill: FillReplicas | None = None
    message: str = ""  # where two answers differ


def wanted(pool: Raw, spec: PoolSpec, sizing: SizingPlan) -> Replicas:
    """Only for a plan that fits."""
    own, owner = budgeted_replicas(spec, sizing), owner_of(pool)
    if spec.replicas is not None and owner != FIELD_MANAGER:
        budgeted = own if spec.kv_budget else spec.replicas
        return Replicas(number=spec.replicas, budgeted=budgeted, owner=owner, message=_disagreement(spec, own, owner))
    why = sizing.reason if spec.kv_budget else "nothing sets it, and there is no kvBudget."
    fill = FillReplicas(replicas=own, reason=why) if spec.replicas != own else None
    return Replicas(number=own, budgeted=own, owner=FIELD_MANAGER, fill=fill)


def owner_of(pool: Raw) -> str:
    """Who owns spec.replicas. Shared with others, it is theirs; without any record, whoever wrote the object's."""
    entries = pool["metadata"].get("managedFields") or ()
    owners = [str(entry.get("manager") or "unknown") for entry in entries if _owns(entry)]
    others = sorted({owner for owner in owners if owner != FIELD_MANAGER})
    if others:
        return ", ".join(others)
    return FIELD_MANAGER if owners else "unknown"


def _owns(entry: Raw) -> bool:
    fields = (entry.get("fieldsV1") or {}).get("f:spec") or {}
    return "f:replicas" in fields


def _disagreement(spec: PoolSpec, own: int, owner: str) -> str:
    if spec.kv_budget is None or own == spec.replicas:
        return ""
    return (
        f"spec.replicas is {spec.replicas} and belongs to {owner}; kvBudget asks for {own}. "
        "To let kvBudget decide, remove spec.replicas from the pool and from whatever applies it."
    )
