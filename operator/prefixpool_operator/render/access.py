"""Who pods are, what they may ask the API server, and the keys they share."""

from __future__ import annotations

from typing import Final

from prefixpool_operator.identity import Identity
from prefixpool_operator.observed import Raw

_RBAC: Final = "rbac.authorization.k8s.io"


def service_account(identity: Identity) -> Raw:
    """Only routers mount a token of it."""
    found = identity.object("v1", "ServiceAccount", identity.name)
    found["automountServiceAccountToken"] = False
    return found


def role(identity: Identity) -> Raw:
    """All that a router asks: where the replicas are."""
    rules = [{"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}]
    return identity.object(f"{_RBAC}/v1", "Role", identity.name, rules=rules)


def role_binding(identity: Identity) -> Raw:
    return identity.object(
        f"{_RBAC}/v1",
        "RoleBinding",
        identity.name,
        roleRef={"apiGroup": _RBAC, "kind": "Role", "name": identity.name},
        subjects=[{"kind": "ServiceAccount", "name": identity.name, "namespace": identity.namespace}],
    )


def keys(identity: Identity) -> Raw:
    """Engine key and salt key, filled when it is created. Apart, so that rotating the first keeps the cache."""
    return identity.object("v1", "Secret", identity.keys, type="Opaque")
