"""The container of a router: a native sidecar of each replica, or the container of a pod of its own."""

from __future__ import annotations

from typing import Any, Final

from prefixpool import names
from prefixpool.api.router import RouterLimits
from prefixpool.listening import EVERYWHERE
from prefixpool_operator.identity import KEY_ENGINE, KEY_SALT
from prefixpool_operator.observed import Raw
from prefixpool_operator.render import volumes
from prefixpool_operator.render.blueprint import ROUTER_ACCEPT_S, Blueprint
from prefixpool_operator.render.container import SECURITY, from_field, http_get, resources, variables

NAME: Final = "router"
PREFIX: Final = "PREFIXPOOL_ROUTER"
PORT_NAME: Final = "http"
_REQUESTS: Final = {"cpu": "100m", "memory": 256 << 20}
_LIMITS: Final = {"memory": 2 << 30}  # index, waiting bodies, connections


def container(plan: Blueprint) -> Raw:
    """Liveness is tolerant: a restart would cut every stream that runs through this router."""
    return {
        "name": NAME,
        "image": plan.settings.router_image,
        "imagePullPolicy": plan.settings.image_pull_policy,
        "command": ["prefixpool-router"],
        "env": _environment(plan),
        "ports": [
            {"name": PORT_NAME, "containerPort": names.ROUTER_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": names.ROUTER_ADMIN_PORT, "protocol": "TCP"},
        ],
        "resources": resources(plan.spec.router.resources, _REQUESTS, _LIMITS),
        "readinessProbe": http_get(names.PATH_READYZ, "admin", period_s=2, failures=2),
        "livenessProbe": http_get(names.PATH_HEALTHZ, "admin", period_s=10, failures=6, timeout_s=5),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": SECURITY,
        "volumeMounts": volumes.router_mounts(plan),
    } | ({"restartPolicy": "Always"} if plan.sidecars else {})


def _environment(plan: Blueprint) -> list[Raw]:
    return [from_field(f"{PREFIX}_NAME", "metadata.name"), *variables(PREFIX, _settings(plan))]


def _settings(plan: Blueprint) -> dict[str, Any]:
    """Names are those of the router's settings; None leaves its default."""
    model = plan.spec.model
    return {
        "host": EVERYWHERE,
        "port": names.ROUTER_PORT,
        "admin_host": EVERYWHERE,
        "admin_port": names.ROUTER_ADMIN_PORT,
        "kubernetes_service": plan.identity.replicas_service,
        "served_models": ",".join([model.name, *(one.name for one in model.adapters)]),
        "ready_without_replicas": True if not plan.sidecars else None,
        "engine_key_file": f"{volumes.KEYS}/{KEY_ENGINE}",
        "salt_key_file": f"{volumes.KEYS}/{KEY_SALT}",
        "keys_file": f"{volumes.AUTH}/{volumes.AUTH_KEY}" if plan.spec.auth.keys_secret else None,
        "policy": plan.spec.router.policy.value,
        **_limits(plan.spec.router.limits or RouterLimits()),
        "drain_accept_s": ROUTER_ACCEPT_S,
        "drain_timeout_s": plan.drain_s,
        "log_format": "json",
        "access_log": True if plan.spec.router.access_log else None,
    }


def _limits(limits: RouterLimits) -> dict[str, Any]:
    return {
        "max_inflight": limits.max_inflight,
        "max_queued": limits.max_queued,
        "queue_timeout_s": limits.queue_timeout_seconds or None,
        "max_body_bytes": None if limits.max_body is None else int(limits.max_body),
    }
