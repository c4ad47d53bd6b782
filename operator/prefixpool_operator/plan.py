"""`plan(observed)`: all that the operator decides. Pure, level-based, for every trigger the same; it never raises.

Accept the spec, size it, render what there should be, compare it with what there is, and say how things stand.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from prefixpool.api.reading import SpecError
from prefixpool.api.spec import PoolSpec
from prefixpool.api.status import WORD_MOST, ConditionStatus, ConditionType, PoolStatus, Reason, SizingStatus, TierStatus
from prefixpool.sizing.plan import SizingPlan
from prefixpool.sizing.tiers import TierSize
from prefixpool_operator import downloads, troubles, verdicts
from prefixpool_operator.actions import Apply, Delete, Event, EventType, FillReplicas, Plan
from prefixpool_operator.conditions import Verdict, conditions, events
from prefixpool_operator.identity import A_PUT_BACK
from prefixpool_operator.observed import Observed
from prefixpool_operator.replicas import Replicas
from prefixpool_operator.sized import Sized, size
from prefixpool_operator.troubles import Trouble
from prefixpool_operator.view import View
from prefixpool_operator.work import Work, inspecting, working

_REFUSED_CHARS: Final = 1000
_VALID = Verdict.yes(Reason.VALID, "The spec can be used as it is.")


def plan(observed: Observed) -> Plan:
    """What to do, what to say, and when to look again although nothing happens."""
    if observed.pool["metadata"].get("deletionTimestamp"):  # the garbage collector takes the children
        return Plan(status=observed.pool.get("status") or {}, status_changed=False)
    view = View.of(observed)
    try:
        spec = PoolSpec.from_object(observed.pool)
    except SpecError as error:
        return _finish(view, None, Work(), _unsized(), Verdict.no(Reason.INVALID_SPEC, f"{error}. Nothing is changed."))
    sized = size(observed, spec, view.identity)
    work = _work(observed, spec, sized, view)
    accepted = _VALID
    if work.taken:
        names = ", ".join(f"{kind} {name}" for kind, name in work.taken)
        told = (
            f"{names} exists and is not this pool's: remove or rename it, or give the pool another name. Nothing is changed."
        )
        accepted = Verdict.no(Reason.NAME_TAKEN, told)
    return _finish(view, spec, replace(work, actions=()) if spec.paused else work, sized, accepted)


def _work(observed: Observed, spec: PoolSpec, sized: Sized, view: View) -> Work:
    if sized.plan is None or sized.planned is None:
        return inspecting(observed, spec, sized, view)
    return working(observed, spec, sized, sized.planned, view)


def _unsized() -> Sized:
    return Sized(status=ConditionStatus.UNKNOWN, reason=Reason.PENDING, message="The spec must be accepted first.")


def _finish(view: View, spec: PoolSpec | None, work: Work, sized: Sized, accepted: Verdict) -> Plan:
    found, deadlines = troubles.look(view)
    if view.refused:
        found.append(Trouble(reason=Reason.WRITE_REFUSED, message=f"a change is refused: {view.refused[:_REFUSED_CHARS]}"))
    if sized.reason is Reason.INSPECTION_FAILED:
        found.append(Trouble(reason=sized.reason, message=sized.message))
    found += [*work.troubles, *(Trouble(reason=Reason.FOREIGN_EDITS, message=one) for one in work.insists)]
    sized_message = " ".join(filter(None, (sized.message, work.replicas.message if work.replicas else "")))
    said = {
        ConditionType.ACCEPTED: accepted,
        ConditionType.SIZED: Verdict(status=sized.status, reason=sized.reason, message=sized_message),
        ConditionType.AVAILABLE: verdicts.available(view, work, spec.rollout.max_unavailable if spec else 1),
        ConditionType.PROGRESSING: downloads.with_download(
            verdicts.progressing(view, work, paused=spec is not None and spec.paused), view
        ),
        ConditionType.DEGRADED: verdicts.degraded(found),
    }
    status = _status(view, work, sized, said)
    wakes_s = [*work.wakes_s, *(max(0.0, one.at_s - view.now_s) for one in deadlines)]
    return Plan(
        actions=work.actions,
        status=status.to_object(),
        status_changed=status != view.before,
        done=tuple(_told(work)),
        events=(
            *downloads.events(view, said[ConditionType.PROGRESSING]),
            *events(view.before, status.conditions),
        ),
        wake_after_s=min(wakes_s, default=None),
    )


def _status(view: View, work: Work, sized: Sized, said: dict[ConditionType, Verdict]) -> PoolStatus:
    identity, target = view.identity, work.target
    living = [pod for pod in view.workers if pod.terminating_s is None]
    sizing = sized.plan or sized.planned
    return PoolStatus(
        observed_generation=identity.generation,
        conditions=conditions(view.before, said, identity.generation, view.now_s),
        replicas=len(living),
        ready_replicas=sum(pod.available for pod in living),
        updated_replicas=0 if work.held else view.updated(target),
        selector=identity.selector,
        endpoint=identity.endpoint if view.stateful is not None or target is not None else None,
        replicas_managed_by=work.replicas.owner[:WORD_MOST] if work.replicas else None,
        shape_source=sized.shape_source.value if sized.shape_source else None,
        sizing=_sizing(sizing, work.replicas) if sizing else None,
    )


def _sizing(plan: SizingPlan, replicas: Replicas | None) -> SizingStatus:
    return SizingStatus(
        weights_bytes=plan.weights_bytes,
        kv_bytes_per_token=plan.kv_bytes_per_token,
        device_per_replica=_tier(plan.device_per_replica),
        host_per_replica=_tier(plan.host_per_replica) if plan.host_per_replica.bytes else None,
        disk_per_replica=_tier(plan.disk_per_replica) if plan.disk_per_replica.bytes else None,
        concurrent_sequences=int(plan.concurrent_sequences),
        max_model_len=plan.max_model_len,
        sessions_per_replica=plan.sessions_per_replica or None,
        replicas=replicas.budgeted if replicas else plan.replicas,
        limited_by=plan.limited_by,
        source=plan.source,
    )


def _tier(size: TierSize) -> TierStatus:
    return TierStatus(bytes=size.bytes, blocks=size.blocks, tokens=size.tokens)


def _told(work: Work) -> list[Event]:
    """Actions that a person may wonder about."""
    found = [
        Event(type=EventType.NORMAL, reason="ReplacingPod", message=f"Deleting {one.name}: {one.reason}")
        for one in work.actions
        if isinstance(one, Delete) and one.kind == "Pod"
    ]
    for one in work.actions:
        if isinstance(one, FillReplicas):
            told = f"spec.replicas is now {one.replicas}: {one.reason}"
            found.append(Event(type=EventType.NORMAL, reason="ReplicasFilled", message=told))
        if isinstance(one, Apply) and A_PUT_BACK in one.object["metadata"]["annotations"]:
            found.append(Event(type=EventType.WARNING, reason="PutBack", message=f"Put back: {one.reason}"))
    return found
