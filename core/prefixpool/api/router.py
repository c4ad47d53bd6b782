"""`spec.router` and `spec.auth`: how requests come in."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from msgspec import Meta

from prefixpool.api.engine import Resources
from prefixpool.api.quantity import Bytes
from prefixpool.api.struct import ApiStruct, ObjectName, Rule, Small, Timeout

_Count = Annotated[int, Meta(ge=1, le=10_000_000)]


class RouterMode(StrEnum):
    """Where routers run."""

    SIDECAR = "Sidecar"
    DEPLOYMENT = "Deployment"


class RouterPolicy(StrEnum):
    """How a replica is chosen (`prefixpool.policy.registry`)."""

    PREFIX = "prefix"
    CHWBL = "chwbl"
    LEAST_LOAD = "least_load"
    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    SESSION = "session"


class RouterLimits(ApiStruct, frozen=True, kw_only=True):
    """What one router takes on at once."""

    rules: ClassVar = (
        Rule(
            "",
            "maxBody is too small for any request: set router.limits.maxBody to 1Mi or more, or leave it out",
            lambda limits: limits.max_body is None or limits.max_body >= 1 << 20,
        ),
    )

    max_inflight: Annotated[
        _Count | None, Meta(description="Requests served at once; by default as many as replicas take.")
    ] = None
    max_queued: Annotated[_Count | None, Meta(description="Requests that may wait for a place; more get 429.")] = None
    queue_timeout_seconds: Annotated[
        Timeout | None, Meta(description="How long a request may wait for a place before it gets 429.")
    ] = None
    max_body: Annotated[Bytes | None, Meta(description="Longest request body, such as 16Mi.")] = None


class Router(ApiStruct, frozen=True, kw_only=True):
    """The routers of the pool."""

    rules: ClassVar = (
        Rule(
            "!has(self.replicas) || self.mode == 'Deployment'",
            "in Sidecar mode each replica has its router: remove router.replicas, or set router.mode to Deployment",
            lambda router: router.replicas is None or router.mode is RouterMode.DEPLOYMENT,
            ".replicas",
        ),
    )

    mode: Annotated[
        RouterMode,
        Meta(
            description="Sidecar: one in each replica's pod. Deployment: in pods of their own, which answer with 0 replicas."
        ),
    ] = RouterMode.SIDECAR
    replicas: Annotated[Small | None, Meta(description="Routers in Deployment mode; by default 2.")] = None
    policy: Annotated[RouterPolicy, Meta(description="How a replica is chosen.")] = RouterPolicy.PREFIX
    resources: Annotated[Resources | None, Meta(description="Requests and limits of each router.")] = None
    limits: Annotated[RouterLimits | None, Meta(description="What one router takes on at once.")] = None
    access_log: Annotated[
        bool,
        Meta(description="Routers log one line for each request that has ended, without its text."),
    ] = False


class Auth(ApiStruct, frozen=True, kw_only=True):
    """Who may send requests."""

    keys_secret: Annotated[
        ObjectName | None,
        Meta(
            description="Secret whose key `keys` lists API keys, one a line: `sha256 scope`. None: everyone, in one scope."
        ),
    ] = None
