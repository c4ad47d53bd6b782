"""`spec.placement`: on which nodes pods run."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, ClassVar

from msgspec import Meta, field

from prefixpool.api.struct import ATOMIC, OPEN, ApiStruct, ObjectName, Rule, Small, Text

_LabelValue = Annotated[str, Meta(max_length=63)]


class TolerationOperator(StrEnum):
    """How a taint's value is compared."""

    EXISTS = "Exists"
    EQUAL = "Equal"


class TaintEffect(StrEnum):
    """What a taint does to pods."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class Toleration(ApiStruct, frozen=True, kw_only=True):
    """A taint that pods put up with."""

    rules: ClassVar = (
        Rule(
            "has(self.key) || self.operator == 'Exists'",
            "a toleration without key needs operator Exists: name the key, or tolerate everything with Exists",
            lambda one: one.key is not None or one.operator is TolerationOperator.EXISTS,
        ),
    )

    key: Annotated[Text | None, Meta(description="Key of the taint; none: every taint.")] = None
    operator: Annotated[TolerationOperator, Meta(description="How the value is compared.")] = TolerationOperator.EQUAL
    value: Annotated[_LabelValue | None, Meta(description="Value of the taint.")] = None
    effect: Annotated[TaintEffect | None, Meta(description="Effect of the taint; none: every effect.")] = None
    toleration_seconds: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="How long a taint with NoExecute is put up with; none: for ever."),
    ] = None


class WhenUnsatisfiable(StrEnum):
    """What happens to a pod that would break the spread."""

    SCHEDULE_ANYWAY = "ScheduleAnyway"
    DO_NOT_SCHEDULE = "DoNotSchedule"


class Spread(ApiStruct, frozen=True, kw_only=True):
    """How replicas spread over parts of the cluster."""

    topology_key: Annotated[Text, Meta(description="Label of nodes, such as topology.kubernetes.io/zone.")]
    max_skew: Annotated[Small, Meta(description="By how many pods two parts may differ.")] = 1
    when_unsatisfiable: Annotated[WhenUnsatisfiable, Meta(description="What happens where it cannot be kept.")] = (
        WhenUnsatisfiable.SCHEDULE_ANYWAY
    )


class Placement(ApiStruct, frozen=True, kw_only=True):
    """On which nodes pods run."""

    node_selector: Annotated[dict[Text, _LabelValue], Meta(description="Labels that a node must have.", max_length=32)] = (
        field(default_factory=dict)
    )
    tolerations: Annotated[
        tuple[Toleration, ...],
        Meta(description="Taints that pods put up with.", max_length=32, extra_json_schema=ATOMIC),
    ] = ()
    affinity: Annotated[
        dict[str, Any] | None,
        Meta(description="Affinity of pods, as in a Pod's spec.affinity.", extra_json_schema=OPEN),
    ] = None
    topology_spread: Annotated[
        tuple[Spread, ...],
        Meta(description="How replicas spread over zones or nodes.", max_length=8, extra_json_schema=ATOMIC),
    ] = ()
    priority_class_name: Annotated[ObjectName | None, Meta(description="PriorityClass of pods.")] = None
    runtime_class_name: Annotated[
        ObjectName | None,
        Meta(
            description="RuntimeClass of replicas, where devices need another runtime than the node's own: `nvidia` on k3s, "
            "RKE2 and wherever NVIDIA's is not the default. It must exist, else no pod is made."
        ),
    ] = None
