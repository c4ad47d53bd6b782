"""What is to be done about a pool now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec
from msgspec.structs import replace

from prefixpool.api.sizing import ShapeSource
from prefixpool.api.spec import PoolSpec
from prefixpool.api.status import Reason
from prefixpool.sizing.plan import SizingPlan
from prefixpool_operator import children, drift, replicas, troubles
from prefixpool_operator.actions import Action, Apply, Delete, PatchImage
from prefixpool_operator.children import STATEFUL_SET, Wanted
from prefixpool_operator.identity import A_ROUTER_BEFORE, A_ROUTER_IMAGE, KEY_ENGINE, KEY_SALT, Component, key_of
from prefixpool_operator.observed import Key, Observed
from prefixpool_operator.pod import A_RESTARTED, Pod
from prefixpool_operator.remembered import Remembered
from prefixpool_operator.render.blueprint import Blueprint
from prefixpool_operator.render.inspection import inspection_job
from prefixpool_operator.replicas import Replicas
from prefixpool_operator.rollout import Step, Target, step
from prefixpool_operator.sized import Sized
from prefixpool_operator.troubles import Trouble
from prefixpool_operator.view import View

_TAKEN_S: Final = 30.0  # until a name that is taken is looked at again


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """`target` is None while there is no plan to carry out."""

    actions: tuple[Action, ...] = ()
    target: Target | None = None
    replicas: Replicas | None = None
    sidecars: bool = True
    step: Step = Step()
    waits: str = ""  # why the rollout does not go on, apart from pods
    held: bool = False  # pods stay as they are: see claims
    insists: tuple[str, ...] = ()
    troubles: tuple[Trouble, ...] = ()
    wakes_s: tuple[float, ...] = ()
    taken: tuple[Key, ...] = ()


def inspecting(observed: Observed, spec: PoolSpec, sized: Sized, view: View) -> Work:
    """While the model's shape is not known."""
    if sized.inspected.stale_job is not None:
        return Work(actions=(children.delete(sized.inspected.stale_job, "it looks at another model"),))
    if not sized.inspect:
        return Work(wakes_s=(troubles.LOOK_S,) if sized.inspected.job and not sized.inspected.failed else ())
    job = inspection_job(view.identity, spec, observed.settings)
    if key_of(job) in observed.taken:
        return Work(taken=(key_of(job),), wakes_s=(_TAKEN_S,))
    outcome = drift.settle(job, None, view.now_s)
    return Work(actions=(outcome.action,) if outcome.action else ())


def working(observed: Observed, spec: PoolSpec, sized: Sized, planned: SizingPlan, view: View) -> Work:
    """With a plan that fits. `planned`: as before engines corrected it, because pods are made from the spec alone."""
    plan = Blueprint(identity=view.identity, spec=spec, sizing=planned, settings=observed.settings)
    number = replicas.wanted(observed.pool, spec, sized.plan or planned)
    wanted = children.wanted(observed, plan, sized, number.number, view.workers)
    names = (("Secret", view.identity.keys), *map(key_of, wanted.objects))
    taken = tuple(key for key in names if key in observed.taken)
    target = _target(plan, wanted, view)
    common = Work(
        target=target,
        replicas=number,
        sidecars=plan.sidecars,
        held=wanted.claims.hold,
        troubles=(*wanted.claims.troubles, *_keyless(observed, view)),
        taken=taken,
        waits=_waits(observed, plan, wanted),
    )
    if taken:  # by what bears no label of ours, so that no watch tells when it is gone
        return replace(common, wakes_s=(_TAKEN_S,))
    return _acting(observed, common, plan, sized, wanted, view)


def _keyless(observed: Observed, view: View) -> Iterator[Trouble]:
    """Keys that somebody removed: a Secret that is there is never written, and pods without them do not start."""
    secret = observed.children.get(("Secret", view.identity.keys))
    lost = [key for key in (KEY_ENGINE, KEY_SALT) if secret is not None and key not in (secret.get("data") or {})]
    if lost:
        yield Trouble(
            reason=Reason.SECRET_MISSING,
            message=f"Secret {view.identity.keys} has no {' and no '.join(lost)}, so no pod can start: put back what was "
            "there, or delete the Secret, and a new one is made",
        )


def _acting(observed: Observed, work: Work, plan: Blueprint, sized: Sized, wanted: Wanted, view: View) -> Work:
    settled = children.settle(observed, view.identity, wanted.objects)
    assert work.target is not None
    assert work.replicas is not None
    leaving = [f"{kind} {name}" for kind, name in settled.leaving]
    waits = f"waits until {', '.join(leaving)}, which is being deleted, is gone" if leaving else work.waits
    steady = view.stateful is not None and view.templates_seen and not _writes(settled.actions, view)
    now = step(view.workers, work.target) if steady and not waits else Step()
    fill = [work.replicas.fill] if work.replicas.fill else []
    return replace(
        work,
        actions=(*fill, *settled.actions, *_of_step(now, work.target), *_tidying(observed, plan, sized)),
        step=now,
        waits=waits,
        insists=settled.insists,
        wakes_s=settled.wakes_s,
    )


def _writes(actions: Iterable[Action], view: View) -> bool:
    """Whether the StatefulSet changes now: pods follow when Kubernetes has seen it."""
    return any(isinstance(one, Apply) and key_of(one.object) == (STATEFUL_SET, view.identity.name) for one in actions)


def _target(plan: Blueprint, wanted: Wanted, view: View) -> Target:
    template = view.stateful["spec"]["template"] if view.stateful else {}
    annotations = (template.get("metadata") or {}).get("annotations") or {}
    return Target(
        replicas=wanted.replicas,
        revision=wanted.template.revision,
        restarted_at=annotations.get(A_RESTARTED, ""),
        router_image=plan.settings.router_image if plan.sidecars else "",
        max_unavailable=plan.spec.rollout.max_unavailable,
    )


def _waits(observed: Observed, plan: Blueprint, wanted: Wanted) -> str:
    """Sidecars go only when clients are sent to routers of their own."""
    if plan.sidecars or children.serving(observed, plan.identity) in ("", Component.ROUTER):
        return ""
    return f"waits until Deployment {plan.identity.router} is ready and clients are sent there"


def _of_step(now: Step, target: Target) -> Iterator[Action]:
    for pod in now.delete:
        why = "does not come up" if pod.broken else "holds the least that would be lost"
        reason = f"pod {pod.name} is of revision {pod.revision or '(none)'}, {target.revision} is wanted, and it {why}"
        yield Delete(api_version="v1", kind="Pod", name=pod.name, uid=pod.uid, reason=reason)
    for pod in now.patch:
        yield _new_router(pod, target)


def _new_router(pod: Pod, target: Target) -> PatchImage:
    assert pod.router is not None
    return PatchImage(
        pod=pod.name,
        uid=pod.uid,
        container=pod.router.name,
        image=target.router_image,
        annotations={A_ROUTER_BEFORE: pod.router_runs, A_ROUTER_IMAGE: target.router_image},
        reason=f"the router of {pod.name} runs image {pod.router.image}; its engine goes on",
    )


def _tidying(observed: Observed, plan: Blueprint, sized: Sized) -> list[Action]:
    """What has served its purpose: an inspection that is remembered, and routers that moved."""
    job = sized.inspected.job or sized.inspected.stale_job
    remembered = Remembered.read(observed, plan.identity).inspected
    done = job is not None and (remembered is not None or sized.shape_source is not ShapeSource.INSPECTION)
    found: list[Action] = [children.delete(job, "what it found is remembered")] if job is not None and done else []
    return [*found, *children.surplus(observed, plan)]
