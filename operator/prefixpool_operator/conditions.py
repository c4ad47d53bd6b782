"""Conditions from verdicts: what changed, since when, and what of it is worth an Event."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from prefixpool.api.status import MESSAGE_MOST, Condition, ConditionStatus, ConditionType, PoolStatus, Reason
from prefixpool_operator.actions import Event, EventType
from prefixpool_operator.timestamp import stamp

_ALARMS = {
    ConditionType.ACCEPTED: ConditionStatus.FALSE,
    ConditionType.SIZED: ConditionStatus.FALSE,
    ConditionType.AVAILABLE: ConditionStatus.FALSE,
    ConditionType.DEGRADED: ConditionStatus.TRUE,
}


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What is found now of one condition."""

    status: ConditionStatus
    reason: Reason
    message: str

    @classmethod
    def yes(cls, reason: Reason, message: str) -> Verdict:
        return cls(status=ConditionStatus.TRUE, reason=reason, message=message)

    @classmethod
    def no(cls, reason: Reason, message: str) -> Verdict:
        return cls(status=ConditionStatus.FALSE, reason=reason, message=message)


def conditions(
    before: PoolStatus | None, verdicts: Mapping[ConditionType, Verdict], generation: int, now_s: float
) -> tuple[Condition, ...]:
    """All of them, in their fixed order."""
    return tuple(_condition(before, kind, verdicts[kind], generation, now_s) for kind in ConditionType)


def _condition(before: PoolStatus | None, kind: ConditionType, verdict: Verdict, generation: int, now_s: float) -> Condition:
    old = before.condition(kind) if before else None
    since = old.last_transition_time if old is not None and old.status is verdict.status else stamp(now_s)
    return Condition(
        type=kind,
        status=verdict.status,
        reason=verdict.reason,
        message=verdict.message[:MESSAGE_MOST],
        last_transition_time=since,
        observed_generation=generation,
    )


def events(before: PoolStatus | None, now: tuple[Condition, ...]) -> list[Event]:
    """One for each condition whose status or reason changed. A pool's first look tells only what is wrong with it."""
    found = []
    for condition in now:
        old = before.condition(condition.type) if before else None
        alarm = _ALARMS.get(condition.type) is condition.status
        if old is None:
            changed = alarm and condition.type is not ConditionType.AVAILABLE  # nothing was up before
        else:
            changed = (old.status, old.reason) != (condition.status, condition.reason)
        if changed:
            kind = EventType.WARNING if alarm else EventType.NORMAL
            found.append(Event(type=kind, reason=condition.reason.value, message=condition.message))
    return found
