"""What is said of a pool: Accepted is judged in `plan`, Sized in `sized`, the other three here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from prefixpool.api.status import Reason
from prefixpool.listing import listed
from prefixpool_operator.conditions import Verdict
from prefixpool_operator.rollout import Target
from prefixpool_operator.troubles import Trouble
from prefixpool_operator.view import View
from prefixpool_operator.work import Work

_TOLD: Final = 12  # troubles in words: with hundreds of replicas each may have its own
_SHOWN: Final = 5  # names of pods in a message


def available(view: View, work: Work, max_unavailable: int) -> Verdict:
    """Whether requests are answered, whatever is rolling out."""
    replicas = work.target.replicas if work.target else view.replicas_now
    ready = view.ready(replicas)
    told = f"{ready} of {replicas} replicas are ready"
    if replicas == 0 and work.target is None:
        return Verdict.no(Reason.NONE_READY, "No replica runs; see Accepted and Sized.")
    if replicas == 0:
        return Verdict.no(Reason.SCALED_TO_ZERO, "No replica is asked for.")
    apart = view.deployment is not None if work.target is None else not work.sidecars
    if apart and not view.routers_ready:
        return Verdict.no(Reason.NONE_READY, f"{told}, {'but' if ready else 'and'} no router is.")
    if ready == 0:
        return Verdict.no(Reason.NONE_READY, f"{told}.{_unrouted(view, apart)}")
    if ready < replicas - max_unavailable:
        few = f"{told}; rollout.maxUnavailable allows {max_unavailable} to be missing.{_unrouted(view, apart)}"
        return Verdict.no(Reason.TOO_FEW_READY, few)
    return Verdict.yes(Reason.REPLICAS_READY, f"{told}.")


def _unrouted(view: View, apart: bool) -> str:
    """For a moment that is the way of every start; where it lasts, routers may lack rights or a way to agents."""
    pod = next((one for one in view.workers if one.ready_for_routers), None)
    logs = f"deployment/{view.identity.router}" if apart else f"{pod.name} -c router" if pod else ""
    return f" The engine of {pod.name} is up, but no router knows it yet: `kubectl logs {logs}`." if pod else ""


def progressing(view: View, work: Work, *, paused: bool) -> Verdict:
    """False only if everything is as the present spec wants it."""
    target = work.target
    if target is None and paused:
        return Verdict.yes(Reason.PAUSED, "spec.paused is set: nothing is changed, and no Job looks at the model either.")
    if target is None:
        return Verdict.yes(Reason.WAITING, "Nothing is changed until the spec is accepted and sized.")
    if paused:
        return _paused(view, work, target)
    if settled(view, work, target):
        return Verdict.no(Reason.SETTLED, f"All {target.replicas} replicas are as the spec wants them.")
    if work.held:
        return Verdict.yes(Reason.WAITING, "Pods stay as they are until the disk is settled; see Degraded.")
    if work.waits:
        return Verdict.yes(Reason.WAITING, f"The rollout {work.waits}.")
    return _under_way(view, work, target)


def _paused(view: View, work: Work, target: Target) -> Verdict:
    told = f"spec.paused is set: nothing is changed. {_counts(view, target)}"
    return Verdict.no(Reason.PAUSED, told) if settled(view, work, target) else Verdict.yes(Reason.PAUSED, told)


def settled(view: View, work: Work, target: Target) -> bool:
    """Nothing to write, and Kubernetes has done what was written."""
    pods = [pod for pod in view.workers if pod.terminating_s is None]
    return (
        not work.actions
        and not (work.held or work.waits)
        and view.stateful is not None
        and view.templates_seen
        and view.routers_settled
        and len(pods) == len(view.workers) == target.replicas
        and all(pod.available and target.updated(pod) and not pod.router_in_flight for pod in pods)
    )


def _under_way(view: View, work: Work, target: Target) -> Verdict:
    own = [pod for pod in view.workers if pod.ordinal < target.replicas]
    counts = _counts(view, target)
    if view.stateful is None:
        return Verdict.yes(Reason.STARTING, f"The pool is being made. {counts}")
    if failing := listed([pod.name for pod in work.step.failing], _SHOWN):
        return Verdict.yes(
            Reason.ROLLING_OUT, f"The rollout has stopped, because {failing} of the new revision fails. {counts}"
        )
    if any(not target.updated(pod) for pod in own):
        routers = "" if any(target.outdated(pod) for pod in own) else " Only routers change, in place; engines run on."
        waits = f" Waits for {work.step.waits_for}." if work.step.waits_for else ""
        return Verdict.yes(Reason.ROLLING_OUT, counts + routers + waits)
    if len(view.workers) != target.replicas or view.replicas_now != target.replicas:
        return Verdict.yes(Reason.SCALING, f"{len(view.workers)} pods exist, {target.replicas} are wanted. {counts}")
    return Verdict.yes(Reason.STARTING, counts)


def _counts(view: View, target: Target) -> str:
    updated, ready = view.updated(target), view.ready(target.replicas)
    return f"{updated} of {target.replicas} replicas are updated, {ready} ready."


def degraded(troubles: Sequence[Trouble]) -> Verdict:
    """The worst troubles are told; the first one gives the reason."""
    if not troubles:
        return Verdict.no(Reason.HEALTHY, "Nothing that runs is in trouble.")
    more = len(troubles) - _TOLD
    told = [*map(str, troubles[:_TOLD]), *([f"And {more} more."] if more > 0 else [])]
    return Verdict.yes(troubles[0].reason, "\n".join(told))
