"""Objects that make pods."""

from __future__ import annotations

from typing import Final

from prefixpool_operator.identity import Component
from prefixpool_operator.observed import Raw
from prefixpool_operator.render import pods
from prefixpool_operator.render.blueprint import Blueprint

_ROUTERS: Final = 2


def stateful_set(plan: Blueprint, template: Raw, claims: list[Raw], replicas: int) -> Raw:
    """Replicas. Their disks outlive a smaller pool, so that a replica that comes back is warm, but not the pool."""
    found = plan.identity.object(
        "apps/v1",
        "StatefulSet",
        plan.identity.name,
        spec={
            "replicas": replicas,
            "serviceName": plan.identity.replicas_service,
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "selector": {"matchLabels": plan.identity.selects(Component.WORKER)},
            "template": template,
        },
    )
    if claims:
        found["spec"]["volumeClaimTemplates"] = claims
        found["spec"]["persistentVolumeClaimRetentionPolicy"] = {"whenDeleted": "Delete", "whenScaled": "Retain"}
    return found


def router_deployment(plan: Blueprint) -> Raw:
    """Routers apart from replicas. Kubernetes rolls them by itself: nothing is lost but a router's memory."""
    return plan.identity.object(
        "apps/v1",
        "Deployment",
        plan.identity.router,
        spec={
            "replicas": plan.spec.router.replicas or _ROUTERS,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "selector": {"matchLabels": plan.identity.selects(Component.ROUTER)},
            "template": pods.router_template(plan),
        },
    )
