"""Pod templates: who runs beside whom, where, and with which rights."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from prefixpool.api.placement import Placement, Toleration
from prefixpool.api.spec import PoolSpec
from prefixpool_operator import inventory
from prefixpool_operator.identity import Component, Identity
from prefixpool_operator.observed import Raw
from prefixpool_operator.render import router, volumes, worker
from prefixpool_operator.render.blueprint import Blueprint
from prefixpool_operator.render.container import POD_SECURITY

_HOST: Final = "kubernetes.io/hostname"


def worker_template(plan: Blueprint) -> Raw:
    """A replica, with its router in Sidecar mode. `pinned` adds its revision."""
    spec = {
        **common(plan.spec),
        "serviceAccountName": plan.identity.name,
        "terminationGracePeriodSeconds": plan.worker_grace_s,
        "containers": [worker.container(plan)],
        "volumes": volumes.worker_volumes(plan),
        **placement(plan.spec),
        **_runtime(plan.spec),
        "topologySpreadConstraints": _spreads(plan),
    }
    if plan.sidecars:
        spec["initContainers"] = [router.container(plan)]
        spec["volumes"] = [*spec["volumes"], *volumes.router_volumes(plan)]
    return template(plan.identity, Component.WORKER, spec)


def router_template(plan: Blueprint) -> Raw:
    """A router of its own. It runs anywhere: it needs no accelerator."""
    spec = {
        **common(plan.spec),
        "serviceAccountName": plan.identity.name,
        "terminationGracePeriodSeconds": plan.router_grace_s,
        "containers": [router.container(plan)],
        "volumes": volumes.router_volumes(plan),
        "topologySpreadConstraints": [_spread(plan.identity, Component.ROUTER, _HOST)],
    }
    return template(plan.identity, Component.ROUTER, spec)


def template(identity: Identity, component: Component, spec: Raw) -> Raw:
    return {"metadata": {"labels": identity.labels(component)}, "spec": spec}


def common(spec: PoolSpec) -> Raw:
    """Service links would put `<SERVICE>_PORT` variables into the environment, which vLLM reads as its own settings."""
    secrets = [{"name": one.name} for one in spec.engine.image_pull_secrets]
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": POD_SECURITY,
        **({"imagePullSecrets": secrets} if secrets else {}),
    }


def placement(spec: PoolSpec) -> Raw:
    """Where workers may run. Nodes with accelerators are commonly tainted with the name of their resource."""
    given: Placement = spec.placement
    tolerations = [_toleration(one) for one in given.tolerations]
    if not spec.accelerator.on_cpu:
        tolerations += [
            {"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in _taints(spec.accelerator.resource)
        ]
    found: Raw = {
        "nodeSelector": dict(given.node_selector),
        "tolerations": tolerations,
        "affinity": given.affinity,
        "priorityClassName": given.priority_class_name,
    }
    return {name: value for name, value in found.items() if value}


def _taints(resource: str) -> tuple[str, ...]:
    """Nodes whose devices are handed out in parts are tainted as those with whole ones."""
    return (resource, inventory.WHOLE) if inventory.is_part(resource) else (resource,)


def _runtime(spec: PoolSpec) -> Raw:
    """Of pods with devices: routers and inspections do without."""
    name = spec.placement.runtime_class_name
    return {"runtimeClassName": name} if name else {}


def _toleration(one: Toleration) -> Raw:
    found: dict[str, Any] = msgspec.to_builtins(one)
    return {name: value for name, value in found.items() if value is not None}


def _spreads(plan: Blueprint) -> list[Raw]:
    """What was given; over nodes unless that is among it. Two constraints may not name one topology and action."""
    given = [
        _spread(plan.identity, Component.WORKER, one.topology_key, one.max_skew, one.when_unsatisfiable.value)
        for one in plan.spec.placement.topology_spread
    ]
    default = [] if any(one["topologyKey"] == _HOST for one in given) else [_spread(plan.identity, Component.WORKER, _HOST)]
    return [*given, *default]


def _spread(identity: Identity, component: Component, key: str, skew: int = 1, action: str = "ScheduleAnyway") -> Raw:
    return {
        "maxSkew": skew,
        "topologyKey": key,
        "whenUnsatisfiable": action,
        "labelSelector": {"matchLabels": identity.selects(component)},
    }
