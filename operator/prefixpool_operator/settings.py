"""Settings of the operator: the reference for `prefixpool-operator --help` and docs/reference/settings.md."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from prefixpool.logs import LogFormat, LogLevel

PREFIX: Final = "PREFIXPOOL_OPERATOR"

Seconds = Annotated[float, Meta(gt=0)]
Name = Annotated[str, Meta(min_length=1)]


class PullPolicy(StrEnum):
    """As Kubernetes knows it."""

    IF_NOT_PRESENT = "IfNotPresent"
    ALWAYS = "Always"
    NEVER = "Never"


class OperatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One operator process."""

    # What it looks after
    namespaces: Annotated[
        tuple[str, ...], Meta(description="namespaces whose pools are looked after; none named: those of all namespaces")
    ] = ()
    worker_image: Annotated[Name, Meta(description="image of workers whose pool names none (spec.engine.image)")]
    router_image: Annotated[
        Name, Meta(description="image of routers; a new one is put into running pods, no engine restarts")
    ]
    image_pull_policy: Annotated[PullPolicy, Meta(description="of both images")] = PullPolicy.IF_NOT_PRESENT
    router_rbac: Annotated[
        bool,
        Meta(
            description="make each pool's Role and RoleBinding, which let its routers watch EndpointSlices; needs the right"
        ),
    ] = True

    # Pace
    resync_s: Annotated[
        Seconds, Meta(description="between two lists of everything, which heal whatever watching missed")
    ] = 60.0
    concurrency: Annotated[int, Meta(description="pools reconciled at once", ge=1, le=256)] = 16
    api_timeout_s: Annotated[Seconds, Meta(description="for one answer of the API server")] = 15.0
    agent_timeout_s: Annotated[Seconds, Meta(description="for one agent's /info")] = 2.0

    # Leadership
    namespace: Annotated[
        str,
        Meta(
            description="the operator's own, where its Lease is; empty: its ServiceAccount's, outside of a cluster default"
        ),
    ] = ""
    lease_name: Annotated[Name, Meta(description="Lease that only one of several operators holds")] = "prefixpool-operator"
    lease_duration_s: Annotated[
        float, Meta(description="how long others wait for a leader that does not renew; whole seconds", ge=1)
    ] = 15.0
    lease_renew_s: Annotated[
        Seconds, Meta(description="how long a leader tries to renew before it exits; less than the duration")
    ] = 10.0
    lease_retry_s: Annotated[Seconds, Meta(description="between two tries to take or renew the Lease")] = 2.0

    # Telling
    host: Annotated[str, Meta(description="address for metrics and health")] = "127.0.0.1"
    port: Annotated[int, Meta(description="port for metrics and health; 0: any free one", ge=0, le=65535)] = 8080
    log_level: Annotated[LogLevel, Meta(description="least severe line that is written")] = LogLevel.INFO
    log_format: Annotated[LogFormat, Meta(description="of log lines")] = LogFormat.TEXT
