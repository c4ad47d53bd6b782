"""What keeps pods from being made, or from being started: Kubernetes tells that in Events and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from prefixpool_operator.observed import Raw
from prefixpool_operator.pod import read
from prefixpool_operator.timestamp import seconds

RECENT_S: Final = 600.0  # a kubelet that fails again and again says so at least every five minutes
_ASKED: Final = 8  # objects of one pool
_RUNNING: Final = frozenset({"Unhealthy", "ProbeWarning", "BackOff", "FailedPreStopHook", "FailedPostStartHook"})
_VAGUE: Final = "Unable to attach or mount volumes"  # stands beside an Event that says why


def subjects(makers: Iterable[Raw | None], pods: Iterable[Raw]) -> list[str]:
    """Uids of the objects whose warnings are worth reading. `makers` of pods: StatefulSet and Job."""
    lacking = [one["metadata"]["uid"] for one in makers if one is not None and lacks_pods(one)]
    return [*lacking, *sorted(pod.uid for pod in map(read, pods) if pod.unmade_since_s is not None)][:_ASKED]


def said(warnings: Iterable[Raw], uid: str, since_s: float) -> str:
    """What was warned of since then about one object, every message once; "" if nothing was.

    Words about containers that run, or did, say nothing of why some cannot be made.
    """
    messages = {
        str(one.get("message") or "").strip()
        for one in warnings
        if (one.get("involvedObject") or {}).get("uid") == uid
        and one.get("reason") not in _RUNNING
        and _last_s(one) >= since_s
    }
    return "; ".join(sorted(one for one in messages if one and not one.startswith(_VAGUE)))


def lacks_pods(maker: Raw) -> bool:
    spec, status = maker.get("spec") or {}, maker.get("status") or {}
    if maker["kind"] == "Job":
        return not any(status.get(name) for name in ("active", "succeeded", "failed"))
    return bool((status.get("replicas") or 0) < (spec.get("replicas") or 0))


def _last_s(event: Raw) -> float:
    stamp = event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp")
    return seconds(stamp) if stamp else 0.0
