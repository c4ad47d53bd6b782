"""The condition Sized, and the plan behind it: shape + device + spec → figures, corrected by what engines report."""

from __future__ import annotations

from typing import Final

import msgspec

from prefixpool.api.engine import EngineKind
from prefixpool.api.sizing import NO_SHAPE, ShapeSource, budgeted_replicas, known_shape, sizing_request
from prefixpool.api.spec import PoolSpec
from prefixpool.api.status import ConditionStatus, Reason
from prefixpool.api.struct import REPLICAS_MOST
from prefixpool.sizing import plan as sizing
from prefixpool.sizing import warning
from prefixpool.sizing.errors import ShapeError, SizingError
from prefixpool.sizing.kv import NULL_BLOCKS
from prefixpool.sizing.plan import SizingPlan
from prefixpool.sizing.reasons import gib
from prefixpool.sizing.request import SizingRequest
from prefixpool.sizing.tiers import HostLimits
from prefixpool.wire import Info, State
from prefixpool_operator import device, hindrances, inspection, remembered
from prefixpool_operator.actions import FIELD_MANAGER
from prefixpool_operator.identity import A_REVISION, A_SPEC_HASH, Identity
from prefixpool_operator.inspection import Inspected
from prefixpool_operator.observed import Observed, Raw
from prefixpool_operator.pinned import spec_hash
from prefixpool_operator.remembered import Planned, Remembered
from prefixpool_operator.replicas import owner_of

_TOLD_PERCENT: Final = 10  # engines and plan may differ by so much before it is worth a word
_RETRY: Final = "To look again, delete the Job {}."


class Sized(msgspec.Struct, frozen=True, kw_only=True):
    """`plan` only if the model fits: without it nothing is started, and nothing that runs is touched."""

    status: ConditionStatus
    reason: Reason
    message: str
    plan: SizingPlan | None = None
    planned: SizingPlan | None = None  # as before any engine ran: what pods are made from
    shape_source: ShapeSource | None = None
    inspected: Inspected = Inspected()
    remember: Remembered = Remembered()  # from now on
    spec_hash: str = ""
    inspect: bool = False  # a Job is needed


def size(observed: Observed, spec: PoolSpec, identity: Identity) -> Sized:
    """Never raises: what cannot be sized is said."""
    known, mark = Remembered.read(observed, identity), spec_hash(spec)
    before = known.of_spec(mark)
    inspected = inspection.look(observed, known, spec.model, identity)
    try:
        shape = known_shape(spec.model, spec.engine.kind, inspected.found)
    except ShapeError as error:
        if spec.model.shape is not None:
            return Sized(status=ConditionStatus.FALSE, reason=Reason.REFUSED, message=f"spec.model.shape: {error}")
        return _unshaped(msgspec.structs.replace(inspected, failed=str(error)), identity)
    if shape is None:
        return _unshaped(inspected, identity, _hindrance(observed, inspected.job))
    found = device.look(observed.nodes, before, spec)
    if found.accelerator is None:
        return _unknown(Reason.DEVICE_UNKNOWN, found.unknown, inspected)
    request = sizing_request(spec, shape.shape, found.accelerator)
    planned = _planned(request)
    blocks = _measured_blocks(observed, mark, before, planned.planned)
    sized = _numbered(observed, spec, _corrected(planned, request, blocks))
    remember = Remembered(
        planned=Planned(spec_hash=mark, device=found.device, measured_blocks=blocks),
        inspected=_document(inspected, spec) if shape.source is ShapeSource.INSPECTION else None,
    )
    message = sized.message + _no_room(observed, spec, sized) + _warned(observed, mark, spec, sized)
    return msgspec.structs.replace(
        sized, message=message, shape_source=shape.source, inspected=inspected, remember=remember, spec_hash=mark
    )


def _no_room(observed: Observed, spec: PoolSpec, sized: Sized) -> str:
    if sized.plan is None or spec.engine.kind is EngineKind.SIM:
        return ""
    return device.no_room(observed.nodes, spec, sized.plan.host_needs.memory)


def _warned(observed: Observed, mark: str, spec: PoolSpec, sized: Sized) -> str:
    """The plan's warnings, and what containers say of their memory: of each hazard the first one."""
    if sized.plan is None:
        return ""
    found = {one.hazard: one for one in sized.plan.warnings}
    reported = {} if spec.engine.kind is EngineKind.SIM else _reported(observed, mark)
    for name, info in sorted(reported.items()):
        limits = HostLimits(memory=info.memory.limit_bytes, shared_memory=info.memory.shared_limit_bytes)
        seen = warning.of_limits(sized.plan.host_needs, limits, name)
        for one in (*seen, *warning.of_use(info.memory.limit_bytes, info.memory.most_used_bytes, name)):
            found.setdefault(one.hazard, one)
    return f" {warning.sentences(tuple(found.values()))}" if found else ""


def _document(inspected: Inspected, spec: PoolSpec) -> remembered.Inspected:
    return remembered.Inspected(subject=inspection.subject(spec.model), document=inspected.document)


def _unknown(reason: Reason, message: str, inspected: Inspected, *, inspect: bool = False) -> Sized:
    return Sized(status=ConditionStatus.UNKNOWN, reason=reason, message=message, inspected=inspected, inspect=inspect)


def _hindrance(observed: Observed, job: Raw | None) -> str:
    if job is None or not hindrances.lacks_pods(job):
        return ""
    said = hindrances.said(observed.warnings, job["metadata"]["uid"], since_s=0.0)
    return f" Its pod cannot be made: {said}" if said else ""


def _unshaped(inspected: Inspected, identity: Identity, hindrance: str = "") -> Sized:
    if inspected.failed:
        retry = _RETRY.format(identity.inspection)
        message = f"{NO_SHAPE}. The inspection of its files failed: {inspected.failed}. {retry}"
        return _unknown(Reason.INSPECTION_FAILED, message, inspected)
    tried = f" Its last try failed, and another one follows: {inspected.tried}" if inspected.tried else ""
    message = f"The Job {identity.inspection} reads the model's config.json and the sizes of its weights.{hindrance}{tried}"
    return _unknown(Reason.INSPECTING, message, inspected, inspect=inspected.job is None and inspected.stale_job is None)


def _planned(request: SizingRequest) -> Sized:
    try:
        planned = sizing.plan(request)
    except SizingError as error:
        return Sized(status=ConditionStatus.FALSE, reason=Reason.REFUSED, message=str(error))
    if not planned.fits:
        return Sized(
            status=ConditionStatus.FALSE, reason=Reason.DOES_NOT_FIT, message=_does_not_fit(planned), planned=planned
        )
    return Sized(status=ConditionStatus.TRUE, reason=Reason.PLANNED, message=planned.reason, plan=planned, planned=planned)


def _corrected(sized: Sized, request: SizingRequest, blocks: int) -> Sized:
    """By what engines report, if anything fits at all."""
    if sized.plan is None or blocks <= NULL_BLOCKS:
        return sized
    plan = sizing.corrected(sized.plan, request, blocks)
    return msgspec.structs.replace(sized, reason=Reason.MEASURED, message=plan.reason + _told(sized.plan, plan), plan=plan)


def _numbered(observed: Observed, spec: PoolSpec, sized: Sized) -> Sized:
    """Refused if the budget, which decides, asks for more replicas than a pool may have."""
    budget_decides = spec.replicas is None or owner_of(observed.pool) == FIELD_MANAGER
    asked = budgeted_replicas(spec, sized.plan) if sized.plan and budget_decides else 0
    if asked <= REPLICAS_MOST:
        return sized
    message = (
        f"kvBudget asks for {asked:,} replicas, and a pool has {REPLICAS_MOST:,} at most: lower spec.kvBudget, set "
        "spec.maxReplicas, or give each replica more memory. Nothing is changed."
    )
    return Sized(status=ConditionStatus.FALSE, reason=Reason.REFUSED, message=message, planned=sized.planned)


def _does_not_fit(planned: SizingPlan) -> str:
    others = "; or ".join(planned.changes)
    more = f"It would fit with {others}." if others else "No single change of its settings would make it fit."
    return f"{planned.reason} Short by {gib(planned.short_bytes)} a device. {more} No pod is started."


def _told(planned: SizingPlan, plan: SizingPlan) -> str:
    """Where engines and plan differ much."""
    before, now = planned.device_per_replica.blocks, plan.device_per_replica.blocks
    percent = round(100 * (now - before) / max(1, before))
    if abs(percent) < _TOLD_PERCENT:
        return ""
    word = "fewer" if percent < 0 else "more"
    return f" Engines report {now:,} blocks, {abs(percent)} % {word} than the {before:,} planned."


def _measured_blocks(observed: Observed, mark: str, before: Planned | None, planned: SizingPlan | None) -> int:
    """The least that any engine of this spec has reported, the null block included, in blocks as planned; 0: none yet.

    It can only sink while the spec stays the same, so that a replica that comes and goes changes nothing.
    """
    known = [before.measured_blocks] if before is not None and before.measured_blocks else []
    reported = _reported(observed, mark).values()
    blocks = [
        info.device_blocks * _planned_blocks_in_one(info, planned) + NULL_BLOCKS
        for info in reported
        if info.device_blocks > 0 and info.state in (State.READY, State.FENCED)
    ]
    return min([*known, *blocks], default=0)


def _planned_blocks_in_one(info: Info, planned: SizingPlan | None) -> int:
    """Several, where the engine has chosen larger blocks than the plan has, as its kernels want them."""
    several, rest = divmod(info.block_tokens, planned.block_tokens) if planned is not None else (1, 0)
    return several if several and not rest else 1


def _reported(observed: Observed, mark: str) -> dict[str, Info]:
    """By agents of pods that were made for the spec with this hash."""
    stateful = observed.children.get(("StatefulSet", observed.pool["metadata"]["name"]))
    if stateful is None or (stateful["metadata"].get("annotations") or {}).get(A_SPEC_HASH) != mark:
        return {}
    revision = _revision(stateful["spec"]["template"]["metadata"])
    own = {pod["metadata"]["name"] for pod in observed.pods if _revision(pod["metadata"]) == revision}
    return {name: info for name, info in observed.infos.items() if name in own}


def _revision(metadata: Raw) -> str | None:
    return (metadata.get("annotations") or {}).get(A_REVISION)
