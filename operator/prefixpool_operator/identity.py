"""Names of a pool, its children, and the labels and annotations on them."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

import msgspec

from prefixpool.api.resource import API_VERSION, GROUP, KIND
from prefixpool_operator.actions import FIELD_MANAGER
from prefixpool_operator.observed import Key, Raw

L_POOL: Final = f"{GROUP}/pool"
L_COMPONENT: Final = "app.kubernetes.io/component"
OPERATOR: Final = "operator"  # value of that label on the operator's own pods, as the chart renders them
L_SCRAPE: Final = f"{GROUP}/scrape"  # a namespace that bears it ("true") may read metrics

A_APPLIED: Final = f"{GROUP}/applied"  # digest of the object as it was rendered
A_PUT_BACK: Final = f"{GROUP}/put-back"  # digest of the foreign edit that was undone, and when
A_SPEC_HASH: Final = f"{GROUP}/spec-hash"  # of the parts of the spec that the pinned template was rendered from
A_TEMPLATE: Final = f"{GROUP}/template"  # the pinned template itself
A_REVISION: Final = f"{GROUP}/revision"  # of a pod's template, the router's image left out
A_ROUTER_IMAGE: Final = f"{GROUP}/router-image"  # that a pod's router was asked to run; admission may make another of it
A_ROUTER_BEFORE: Final = f"{GROUP}/router-before"  # container and image that an image patch is about to replace
A_INSPECTS: Final = f"{GROUP}/inspects"  # model and revision that an inspection is about

KEY_ENGINE: Final = "engine"  # data keys of the Secret
KEY_SALT: Final = "salt"


class Component(StrEnum):
    """What a pod is."""

    WORKER = "worker"
    ROUTER = "router"
    INSPECTION = "inspection"


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Of one pool."""

    name: str
    namespace: str
    uid: str
    generation: int

    @classmethod
    def of(cls, pool: Raw) -> Identity:
        meta = pool["metadata"]
        return cls(name=meta["name"], namespace=meta["namespace"], uid=meta["uid"], generation=meta["generation"])

    @property
    def replicas_service(self) -> str:
        return f"{self.name}-replicas"

    @property
    def router(self) -> str:
        return f"{self.name}-router"

    @property
    def keys(self) -> str:
        return f"{self.name}-keys"

    @property
    def config(self) -> str:
        return f"{self.name}-config"

    @property
    def inspection(self) -> str:
        return f"{self.name}-inspect"

    @property
    def endpoint(self) -> str:
        """URL for clients in the cluster."""
        return f"http://{self.name}.{self.namespace}.svc"

    def labels(self, component: Component | None = None) -> dict[str, str]:
        return {
            "app.kubernetes.io/name": "prefixpool",
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/managed-by": FIELD_MANAGER,
            L_POOL: self.name,
        } | ({L_COMPONENT: component.value} if component else {})

    def selects(self, component: Component) -> dict[str, str]:
        """Labels that select the pods of one component."""
        return {L_POOL: self.name, L_COMPONENT: component.value}

    @property
    def selector(self) -> str:
        """The replicas' pods, as a label selector in one string."""
        return ",".join(f"{label}={value}" for label, value in self.selects(Component.WORKER).items())

    def object(self, api_version: str, kind: str, name: str, **content: Any) -> Raw:
        """A child, deleted with its pool. `blockOwnerDeletion` would need a right that the operator can do without."""
        return {
            "apiVersion": api_version,
            "kind": kind,
            "metadata": {
                "name": name,
                "namespace": self.namespace,
                "labels": self.labels(),
                "ownerReferences": [
                    {"apiVersion": API_VERSION, "kind": KIND, "name": self.name, "uid": self.uid, "controller": True}
                ],
            },
            **content,
        }


def key_of(obj: Raw) -> Key:
    """How a child is found in `Observed.children`."""
    return obj["kind"], obj["metadata"]["name"]
