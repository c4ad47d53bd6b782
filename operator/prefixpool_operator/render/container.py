"""What all containers have in common: the restricted security profile, variables, resources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from prefixpool.api.engine import Resources
from prefixpool_operator.observed import Raw

USER_ID: Final = 10001  # a number, because the kubelet cannot tell whether a name is root's

SECURITY: Final[Raw] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
POD_SECURITY: Final[Raw] = {
    "runAsNonRoot": True,
    "runAsUser": USER_ID,
    "runAsGroup": USER_ID,
    "fsGroup": USER_ID,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}


def variables(prefix: str, values: Mapping[str, Any]) -> list[Raw]:
    """Environment of one program, from its settings' names; what is None is left to the program's default."""
    return [
        {"name": f"{prefix}_{name.upper()}", "value": _text(value)} for name, value in values.items() if value is not None
    ]


def from_field(name: str, path: str) -> Raw:
    """A variable with something of the pod itself."""
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def from_secret(name: str, secret: str, key: str) -> Raw:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _text(value: Any) -> str:
    """The kubelet reads `$(NAME)` and `$$`; programs are to get what was written."""
    return str(value).lower() if isinstance(value, bool) else str(value).replace("$", "$$")


def resources(given: Resources | None, requests: Mapping[str, Any], limits: Mapping[str, Any]) -> Raw:
    """What was given wins; a request given alone raises its limit, and a limit given alone lowers its request."""
    asked, most = (dict(given.requests), dict(given.limits)) if given else ({}, {})
    for name, limit in limits.items():
        if name not in most:
            most[name] = asked.get(name, limit)
    for name, request in requests.items():
        if name not in asked:
            asked[name] = given.limits.get(name, request) if given else request
    found = {"requests": asked, "limits": most}
    return {kind: {name: str(amount) for name, amount in sorted(of.items())} for kind, of in found.items() if of}


def http_get(path: str, port: str, *, period_s: int, failures: int, timeout_s: int = 2) -> Raw:
    """A probe."""
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period_s,
        "timeoutSeconds": timeout_s,
        "failureThreshold": failures,
    }
