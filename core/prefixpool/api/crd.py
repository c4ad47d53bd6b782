"""The CustomResourceDefinition, as a plain object. `make crds` writes it to crds/; a test compares."""

from __future__ import annotations

from typing import Any, Final

from prefixpool.api import resource
from prefixpool.api.reading import NAME_RULE
from prefixpool.api.schema import Schema, struct_schema
from prefixpool.api.spec import PoolSpec
from prefixpool.api.status import PoolStatus

FILE: Final = f"{resource.GROUP}_{resource.PLURAL}.yaml"
SCHEMA_ANNOTATION: Final = f"{resource.GROUP}/schema"
SCHEMA: Final = 1  # grows with every change of the schema, so that an operator can tell an older CRD

_NAME_RULES: Final = [
    {
        "rule": f"size(self.metadata.name) <= {resource.NAME_MOST} && self.metadata.name.matches('{resource.NAME_PATTERN}')",
        "message": f"this name {NAME_RULE}",
    }
]


def definition() -> dict[str, Any]:
    """The whole object."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": resource.FULL_NAME, "annotations": {SCHEMA_ANNOTATION: str(SCHEMA)}},
        "spec": {
            "group": resource.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": resource.KIND,
                "listKind": f"{resource.KIND}List",
                "plural": resource.PLURAL,
                "singular": resource.SINGULAR,
                "shortNames": [resource.SHORT_NAME],
                "categories": [resource.CATEGORY],
            },
            "versions": [_version()],
        },
    }


def _version() -> dict[str, Any]:
    return {
        "name": resource.VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": [_column(*column) for column in _COLUMNS],
        "schema": {"openAPIV3Schema": root_schema()},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
    }


def root_schema() -> Schema:
    """Of one InferencePool."""
    return {
        "description": "A pool of replicas of one model, behind one endpoint, that behaves like one large KV cache.",
        "type": "object",
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": {"description": "What the pool should be."} | struct_schema(PoolSpec),
            "status": {"description": "What the operator found."} | struct_schema(PoolStatus),
        },
        "required": ["spec"],
        "x-kubernetes-validations": _NAME_RULES,
    }


def _condition(kind: str, field: str) -> str:
    return f'.status.conditions[?(@.type=="{kind}")].{field}'


# Name, type, path, priority: 0 always, 1 with `-o wide`.
_COLUMNS: Final = (
    ("Model", "string", ".spec.model.source", 0),
    ("Replicas", "integer", ".spec.replicas", 0),
    ("Ready", "integer", ".status.readyReplicas", 0),
    ("Available", "string", _condition("Available", "status"), 0),
    ("Reason", "string", _condition("Available", "reason"), 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Updated", "integer", ".status.updatedReplicas", 1),
    ("Sized", "string", _condition("Sized", "reason"), 1),
    ("Progressing", "string", _condition("Progressing", "reason"), 1),
    ("Degraded", "string", _condition("Degraded", "reason"), 1),
    ("KV-Bytes", "integer", ".status.sizing.kvBytesPerToken", 1),
    ("Device-Tokens", "integer", ".status.sizing.devicePerReplica.tokens", 1),
    ("Host-Tokens", "integer", ".status.sizing.hostPerReplica.tokens", 1),
    ("Limited-By", "string", ".status.sizing.limitedBy", 1),
)


def _column(name: str, kind: str, path: str, priority: int) -> dict[str, Any]:
    return {"name": name, "type": kind, "jsonPath": path} | ({"priority": priority} if priority else {})
