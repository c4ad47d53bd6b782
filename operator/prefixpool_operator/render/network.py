"""How pods are found, and who may reach them."""

from __future__ import annotations

from typing import Final

from prefixpool import names
from prefixpool_operator.identity import L_COMPONENT, L_POOL, L_SCRAPE, OPERATOR, Component, Identity
from prefixpool_operator.observed import Raw
from prefixpool_operator.render.router import PORT_NAME

_CLIENT_PORT: Final = 80
_NAMESPACE: Final = "kubernetes.io/metadata.name"


def replicas_service(identity: Identity) -> Raw:
    """For discovery by routers, which must know a replica before it is ready: it is ready once a router knows it."""
    ports = (("engine", names.ENGINE_PORT), ("agent", names.AGENT_PORT), ("router", names.ROUTER_PORT))
    return identity.object(
        "v1",
        "Service",
        identity.replicas_service,
        spec={
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": identity.selects(Component.WORKER),
            "ports": [{"name": name, "port": port, "targetPort": port, "protocol": "TCP"} for name, port in ports],
        },
    )


def client_service(identity: Identity, component: Component) -> Raw:
    """For clients. Pods without a port of that name, which have no router (any more, or yet), are passed over."""
    return identity.object(
        "v1",
        "Service",
        identity.name,
        spec={
            "type": "ClusterIP",
            "selector": identity.selects(component),
            "ports": [{"name": PORT_NAME, "port": _CLIENT_PORT, "targetPort": PORT_NAME, "protocol": "TCP"}],
        },
    )


def disruption_budget(identity: Identity, component: Component) -> Raw:
    """Pods that are not ready may always be evicted: they protect nothing, and would block the drain of a node."""
    name = identity.router if component is Component.ROUTER else identity.name
    return identity.object(
        "policy/v1",
        "PodDisruptionBudget",
        name,
        spec={
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": identity.selects(component)},
        },
    )


def network_policy(identity: Identity, operator_namespace: str) -> Raw:
    """Routers are for everyone, engines for the pool alone, agents and admin ports also for the operator and for metrics."""
    own = {"podSelector": {"matchLabels": {L_POOL: identity.name}}}
    watchers = [own, {"namespaceSelector": {"matchLabels": {L_SCRAPE: "true"}}}, _operator(operator_namespace)]
    return identity.object(
        "networking.k8s.io/v1",
        "NetworkPolicy",
        identity.name,
        spec={
            "podSelector": {"matchLabels": {L_POOL: identity.name}},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"ports": _ports(names.ROUTER_PORT)},
                {"ports": _ports(names.ENGINE_PORT), "from": [own]},
                {"ports": _ports(names.AGENT_PORT, names.ROUTER_ADMIN_PORT), "from": watchers},
            ],
        },
    )


def _operator(namespace: str) -> Raw:
    """Its pods, by the label that the chart gives them. "" for the namespace: an operator may be in any."""
    return {
        "namespaceSelector": {"matchLabels": {_NAMESPACE: namespace}} if namespace else {},
        "podSelector": {"matchLabels": {L_COMPONENT: OPERATOR}},
    }


def _ports(*ports: int) -> list[Raw]:
    return [{"port": port, "protocol": "TCP"} for port in ports]
