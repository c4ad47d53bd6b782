"""Everything that a pool consists of, rendered, and compared with what is there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from prefixpool_operator import claims, drift
from prefixpool_operator.actions import Action, CreateOnce, Delete
from prefixpool_operator.claims import Claims
from prefixpool_operator.identity import KEY_ENGINE, KEY_SALT, L_COMPONENT, Component, Identity, key_of
from prefixpool_operator.observed import Key, Observed, Raw
from prefixpool_operator.pinned import Pinned, pinned
from prefixpool_operator.pod import Pod
from prefixpool_operator.render import access, network, volumes, workloads
from prefixpool_operator.render.blueprint import Blueprint
from prefixpool_operator.sized import Sized

STATEFUL_SET: Final = "StatefulSet"
DEPLOYMENT: Final = "Deployment"
_BUDGET: Final = "PodDisruptionBudget"
_SECRET_S: Final = 2.0  # Secrets are not watched


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What there should be now."""

    objects: list[Raw]  # in the order in which they are made
    template: Pinned
    claims: Claims
    replicas: int
    component: Component  # that clients are sent to


class Settled(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done to get there."""

    actions: tuple[Action, ...] = ()
    insists: tuple[str, ...] = ()
    wakes_s: tuple[float, ...] = ()
    leaving: tuple[Key, ...] = ()  # objects that are being deleted, or belong to a former pool of this name


def wanted(observed: Observed, plan: Blueprint, sized: Sized, replicas: int, workers: Sequence[Pod]) -> Wanted:
    """Rendered from the plan, with what must be kept of the present."""
    identity = plan.identity
    stateful = observed.children.get((STATEFUL_SET, identity.name))
    disks = claims.settle(volumes.claim_templates(plan), stateful, observed.claims)
    template = pinned(plan, sized.spec_hash, stateful, hold=disks.hold)
    component = _component(observed, plan, workers)
    replica_set = workloads.stateful_set(plan, template.template, disks.templates, replicas)
    replica_set["metadata"]["annotations"] = template.annotations
    rights = [access.role(identity), access.role_binding(identity)] if plan.settings.render_rbac else []
    objects = [
        access.service_account(identity),
        *rights,
        sized.remember.config_map(identity),
        network.network_policy(identity, plan.settings.operator_namespace),
        network.replicas_service(identity),
        network.client_service(identity, component),
        network.disruption_budget(identity, Component.WORKER),
        *([] if plan.sidecars else _routers(plan)),
        replica_set,
    ]
    return Wanted(objects=objects, template=template, claims=disks, replicas=replicas, component=component)


def _routers(plan: Blueprint) -> list[Raw]:
    """Of their own. Clients are sent to nobody else, so nodes that are drained at once must not take all of them."""
    return [network.disruption_budget(plan.identity, Component.ROUTER), workloads.router_deployment(plan)]


def serving(observed: Observed, identity: Identity) -> str:
    """Component that the client Service selects now; "" if there is no Service."""
    service = observed.children.get(("Service", identity.name))
    return str(service["spec"].get("selector", {}).get(L_COMPONENT, "")) if service else ""


def _component(observed: Observed, plan: Blueprint, workers: Sequence[Pod]) -> Component:
    """When routers move, clients follow once they are up in the new place."""
    aim = plan.router_component
    now = serving(observed, plan.identity)
    if now in ("", aim):
        return aim
    deployment = observed.children.get((DEPLOYMENT, plan.identity.router)) or {}
    up = (
        all(pod.available and pod.router is not None for pod in workers)
        if aim is Component.WORKER
        else bool((deployment.get("status") or {}).get("readyReplicas"))
    )
    return aim if up else Component(now)


def settle(observed: Observed, identity: Identity, objects: Iterable[Raw]) -> Settled:
    """Only what differs is written."""
    actions: list[Action] = []
    insists: list[str] = []
    wakes_s: list[float] = []
    leaving: list[Key] = []
    secret = observed.children.get(("Secret", identity.keys))
    if secret is not None and _leaves(secret, identity):  # pods that still mount it would have other keys than later ones
        return Settled(leaving=(key_of(secret),), wakes_s=(_SECRET_S,))
    if secret is None:
        reason = f"Secret {identity.keys} does not exist"
        actions.append(CreateOnce(object=access.keys(identity), random_keys=(KEY_ENGINE, KEY_SALT), reason=reason))
    for rendered in objects:
        present = observed.children.get(key_of(rendered))
        if present is not None and _leaves(present, identity):
            leaving.append(key_of(rendered))
            continue
        outcome = drift.settle(rendered, present, observed.now_s)
        actions += [outcome.action] if outcome.action else []
        insists += [outcome.insists] if outcome.insists else []
        wakes_s += [outcome.wake_after_s] if outcome.wake_after_s is not None else []
    return Settled(actions=tuple(actions), insists=tuple(insists), wakes_s=tuple(wakes_s), leaving=tuple(leaving))


def _leaves(present: Raw, identity: Identity) -> bool:
    """The garbage collector is about to remove it: writing to it would be lost."""
    meta = present["metadata"]
    owners = [ref["uid"] for ref in meta.get("ownerReferences") or () if ref.get("controller")]
    return bool(meta.get("deletionTimestamp")) or (bool(owners) and identity.uid not in owners)


def surplus(observed: Observed, plan: Blueprint) -> list[Action]:
    """Routers of their own that nobody is sent to any more."""
    if not plan.sidecars or serving(observed, plan.identity) != Component.WORKER:
        return []
    found = (observed.children.get((kind, plan.identity.router)) for kind in (DEPLOYMENT, _BUDGET))
    return [delete(one, "routers run beside replicas now, and clients are sent there") for one in found if one is not None]


def delete(obj: Raw, reason: str) -> Delete:
    meta = obj["metadata"]
    api_version = obj.get("apiVersion", "")
    return Delete(api_version=api_version, kind=obj["kind"], name=meta["name"], uid=meta["uid"], reason=reason)
