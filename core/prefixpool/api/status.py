"""PoolStatus: what the operator found, in conditions and figures."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from prefixpool.api.struct import BY_TYPE, OPEN_ENUM, StatusStruct
from prefixpool.sizing.plan import LimitedBy, Source

MESSAGE_MOST: Final = 32_768  # characters; the API server refuses a whole status for one message that is longer
WORD_MOST: Final = 253  # the same

_Bytes = Annotated[int, Meta(ge=0)]
_Count = Annotated[int, Meta(ge=0)]
_Word = Annotated[str, Meta(max_length=WORD_MOST)]


class ConditionType(StrEnum):
    """Every pool has all of them, from the first visit on."""

    ACCEPTED = "Accepted"  # the spec can be used as it is
    SIZED = "Sized"  # model and device are known, and the model fits
    AVAILABLE = "Available"  # requests are answered, also while a change rolls out
    PROGRESSING = "Progressing"  # the pool is on its way to its spec
    DEGRADED = "Degraded"  # something needs a person


class ConditionStatus(StrEnum):
    """As everywhere in Kubernetes."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Reason(StrEnum):
    """Why a condition is as it is: the closed set of all reasons."""

    PENDING = "Pending"  # any condition that the operator has not come to yet

    # Accepted
    VALID = "Valid"
    INVALID_SPEC = "InvalidSpec"
    NAME_TAKEN = "NameTaken"  # a child's name belongs to an object that is not the pool's

    # Sized
    PLANNED = "Planned"
    MEASURED = "Measured"
    DOES_NOT_FIT = "DoesNotFit"
    REFUSED = "Refused"  # settings contradict each other, or the engine would refuse the split
    INSPECTING = "Inspecting"
    INSPECTION_FAILED = "InspectionFailed"
    DEVICE_UNKNOWN = "DeviceUnknown"

    # Available
    REPLICAS_READY = "ReplicasReady"
    TOO_FEW_READY = "TooFewReady"
    NONE_READY = "NoneReady"
    SCALED_TO_ZERO = "ScaledToZero"

    # Progressing
    SETTLED = "Settled"
    STARTING = "Starting"
    SCALING = "Scaling"
    ROLLING_OUT = "RollingOut"
    WAITING = "Waiting"  # for something that a condition or message names
    PAUSED = "Paused"

    # Degraded
    HEALTHY = "Healthy"
    CRASH_LOOPING = "CrashLooping"
    OUT_OF_MEMORY = "OutOfMemory"
    IMAGE_UNAVAILABLE = "ImageUnavailable"
    UNSCHEDULABLE = "Unschedulable"
    POD_REFUSED = "PodRefused"  # quota, pod security, admission
    WRITE_REFUSED = "WriteRefused"  # a child that the API server does not take, or a right that the operator lacks
    SECRET_MISSING = "SecretMissing"  # or a ConfigMap
    DOWNLOAD_FAILED = "DownloadFailed"  # the model's files do not come from the Hub, or have no room
    MOUNT_FAILED = "MountFailed"  # volumes or network of a pod
    CLAIM_PENDING = "ClaimPending"
    CLAIM_CANNOT_SHRINK = "ClaimCannotShrink"
    NODE_LOST = "NodeLost"
    STUCK_TERMINATING = "StuckTerminating"
    FOREIGN_EDITS = "ForeignEdits"  # another manager keeps changing a child
    APPROXIMATE = "Approximate"  # replicas serve, but their caches are not known exactly
    DISK_TIER_FAILING = "DiskTierFailing"  # replicas serve, but compute what their disks should have kept


class Condition(StatusStruct, frozen=True, kw_only=True):
    """One thing that is so, is not so, or is not known."""

    type: Annotated[ConditionType, Meta(description="What the condition is about.", extra_json_schema=OPEN_ENUM)]
    status: Annotated[ConditionStatus, Meta(description="Whether it is so.")]
    reason: Annotated[Reason, Meta(description="Why, in one word for programs.", extra_json_schema=OPEN_ENUM)]
    message: Annotated[str, Meta(description="Why, in words for people.", max_length=MESSAGE_MOST)]
    last_transition_time: Annotated[
        str, Meta(description="When status changed last.", max_length=64, extra_json_schema={"format": "date-time"})
    ]
    observed_generation: Annotated[_Count, Meta(description="Generation of the spec that it is about.")]


class TierStatus(StatusStruct, frozen=True, kw_only=True):
    """One tier of one replica."""

    bytes: Annotated[_Bytes, Meta(description="Bytes that hold KV.")]
    blocks: Annotated[_Count, Meta(description="Blocks of KV.")]
    tokens: Annotated[_Count, Meta(description="Tokens that they hold, in sequences of the greatest length.")]


class SizingStatus(StatusStruct, frozen=True, kw_only=True):
    """What the pool holds."""

    weights_bytes: Annotated[_Bytes, Meta(description="Weights of the model as stored.")]
    kv_bytes_per_token: Annotated[_Bytes, Meta(description="What one more token takes on all devices of a replica.")]
    device_per_replica: Annotated[TierStatus, Meta(description="KV on the devices of one replica.")]
    host_per_replica: Annotated[TierStatus | None, Meta(description="KV in host memory of one replica.")] = None
    disk_per_replica: Annotated[
        TierStatus | None, Meta(description="KV on the disk of one replica; of all, if it is shared.")
    ] = None
    concurrent_sequences: Annotated[_Count, Meta(description="Sequences of maxModelLen that one replica computes at once.")]
    max_model_len: Annotated[_Count, Meta(description="Longest sequence, in tokens.")]
    sessions_per_replica: Annotated[
        _Count | None, Meta(description="Sessions of the budget's length that one replica keeps.")
    ] = None
    replicas: Annotated[_Count, Meta(description="Replicas that the budget needs; without one, those of the spec.")]
    limited_by: Annotated[LimitedBy, Meta(description="What decides the figures.", extra_json_schema=OPEN_ENUM)]
    source: Annotated[
        Source, Meta(description="Planned, or Measured: an engine has confirmed its blocks.", extra_json_schema=OPEN_ENUM)
    ]


class PoolStatus(StatusStruct, frozen=True, kw_only=True):
    """What the operator found."""

    observed_generation: Annotated[_Count, Meta(description="Generation of the spec that the status is about.")]
    conditions: Annotated[
        tuple[Condition, ...],
        Meta(description="Accepted, Sized, Available, Progressing, Degraded.", max_length=16, extra_json_schema=BY_TYPE),
    ] = ()
    replicas: Annotated[_Count, Meta(description="Replicas that exist, ready or not.")]
    ready_replicas: Annotated[_Count, Meta(description="Replicas that answer requests.")]
    updated_replicas: Annotated[_Count, Meta(description="Replicas that run the present spec.")]
    selector: Annotated[str, Meta(description="Label selector of the replicas' pods, for autoscalers.", max_length=1024)]
    endpoint: Annotated[_Word | None, Meta(description="URL for clients in the cluster.")] = None
    replicas_managed_by: Annotated[
        _Word | None,
        Meta(description="Who sets spec.replicas: the operator (from kvBudget), an autoscaler, a person's tool."),
    ] = None
    shape_source: Annotated[
        _Word | None, Meta(description="Where the model's figures come from: Spec, Catalogue or Inspection.")
    ] = None
    sizing: Annotated[SizingStatus | None, Meta(description="What the pool holds.")] = None

    @classmethod
    def from_object(cls, obj: Mapping[str, Any]) -> PoolStatus | None:
        """Of a whole InferencePool; None if there is none yet, or one that this version does not understand."""
        try:
            return msgspec.convert(obj.get("status"), cls)
        except msgspec.ValidationError:
            return None

    def to_object(self) -> dict[str, Any]:
        """As the API server takes it."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    def condition(self, kind: ConditionType) -> Condition | None:
        return next((one for one in self.conditions if one.type is kind), None)
