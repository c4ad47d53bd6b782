"""`spec.kvCache` and `spec.kvBudget`: where KV lies, and what of it must stay warm."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from msgspec import Meta

from prefixpool.api.quantity import Bytes
from prefixpool.api.struct import ApiStruct, ObjectName, Rule, Tokens, at_most_one
from prefixpool.sizing.kv import KvDtype
from prefixpool.sizing.request import BudgetTier

_Percent = Annotated[int, Meta(ge=1, le=100)]
_Many = Annotated[int, Meta(ge=1, le=10**15)]


class Eviction(StrEnum):
    """Which KV leaves the host tier first."""

    WORTH = "worth"  # least expected saving per byte
    LRU = "lru"
    ARC = "arc"


class HostTier(ApiStruct, frozen=True, kw_only=True):
    """KV in the host's memory."""

    memory: Annotated[Bytes, Meta(description="Host memory for KV of each replica; pods request it, and room around it.")]


class DiskTier(ApiStruct, frozen=True, kw_only=True):
    """KV on disk."""

    rules: ClassVar = (
        Rule(
            "!(has(self.storageClassName) && has(self.sharedClaimName))",
            "a disk is made for each replica (storageClassName) or shared by all (sharedClaimName): remove one of them",
            lambda disk: at_most_one(disk.storage_class_name, disk.shared_claim_name),
        ),
    )
    immutable: ClassVar = dict.fromkeys(
        ("storageClassName", "sharedClaimName"),
        "disks of living replicas stay where they are: create a new InferencePool, or remove kvCache.disk first",
    )

    size: Annotated[
        Bytes,
        Meta(description="Disk for KV: of each replica, or of all on a shared claim. Without class or claim: of the node."),
    ]
    storage_class_name: Annotated[
        ObjectName | None, Meta(description="StorageClass of a claim for each replica, which outlives its pods.")
    ] = None
    shared_claim_name: Annotated[
        ObjectName | None,
        Meta(description="Claim (ReadWriteMany) that all replicas share, so that one's KV serves the others."),
    ] = None


class KvCache(ApiStruct, frozen=True, kw_only=True):
    """Where KV lies, and how it is stored."""

    rules: ClassVar = (
        Rule(
            "!has(self.disk) || has(self.host)",
            "blocks pass through host memory on their way to disk: set kvCache.host.memory as well",
            lambda cache: cache.disk is None or cache.host is not None,
        ),
        Rule(
            "!has(self.eviction) || has(self.host)",
            "eviction is about the host tier: set kvCache.host.memory, or remove kvCache.eviction",
            lambda cache: cache.eviction is None or cache.host is not None,
            ".eviction",
        ),
    )

    dtype: Annotated[KvDtype, Meta(description="How KV is stored; auto: as the model computes. fp8 doubles the tokens.")] = (
        KvDtype.AUTO
    )
    memory_utilization_percent: Annotated[
        _Percent | None,
        Meta(description="Share of a device's memory that the engine may take; by default the engine's own."),
    ] = None
    host: Annotated[HostTier | None, Meta(description="A tier in host memory, behind the device.")] = None
    disk: Annotated[DiskTier | None, Meta(description="A tier on disk, behind the host.")] = None
    eviction: Annotated[Eviction | None, Meta(description="Which KV leaves the host tier first; by default worth.")] = None


class KvBudget(ApiStruct, frozen=True, kw_only=True):
    """What must stay warm. It sizes the pool while nothing else sets spec.replicas."""

    rules: ClassVar = (
        Rule(
            "has(self.residentTokens) != (has(self.sessions) || has(self.tokensPerSession))",
            "a budget is residentTokens, or sessions with tokensPerSession: set one of the two",
            lambda one: (one.resident_tokens is None) == (one.sessions is not None or one.tokens_per_session is not None),
        ),
        Rule(
            "has(self.sessions) == has(self.tokensPerSession)",
            "sessions and tokensPerSession are needed together",
            lambda one: (one.sessions is None) == (one.tokens_per_session is None),
        ),
    )

    resident_tokens: Annotated[_Many | None, Meta(description="Tokens to keep warm in the whole pool.")] = None
    sessions: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000_000)] | None, Meta(description="Sessions to keep warm in the whole pool.")
    ] = None
    tokens_per_session: Annotated[Tokens | None, Meta(description="Length of each session in tokens.")] = None
    tier: Annotated[BudgetTier, Meta(description="Where the budget may lie.")] = BudgetTier.DEVICE
