"""Settings of the router: the reference for `prefixpool-router --help` and docs/reference/settings.md."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from prefixpool import names
from prefixpool.logs import LogFormat, LogLevel

PREFIX: Final = "PREFIXPOOL_ROUTER"

Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One router process, or the parent of several (`workers`)."""

    # Replicas
    replica: Annotated[
        tuple[str, ...],
        Meta(description="NAME=ENGINE_URL[,AGENT_URL], once for each replica; without agent: routed by what was sent there"),
    ] = ()
    members: Annotated[str, Meta(description="JSON file with the replicas, read again on change; instead of --replica")] = ""
    members_interval_s: Annotated[float, Meta(description="between two looks at the member file", gt=0)] = 0.5
    kubernetes_service: Annotated[
        str,
        Meta(description="headless Service whose EndpointSlices name the replicas; instead of --replica and --members"),
    ] = ""
    kubernetes_namespace: Annotated[
        str, Meta(description="namespace of that Service; empty: from the file `namespace` beside the token")
    ] = ""
    kubernetes_url: Annotated[
        str, Meta(description="API server; empty: https://$KUBERNETES_SERVICE_HOST:$KUBERNETES_SERVICE_PORT")
    ] = ""
    kubernetes_token_file: Annotated[
        str, Meta(description="token for the API server, read anew for each request; without the file none is sent")
    ] = f"{names.SERVICE_ACCOUNT_DIR}/token"
    kubernetes_ca_file: Annotated[
        str, Meta(description="certificates (PEM) that vouch for the API server; empty: those of the system")
    ] = f"{names.SERVICE_ACCOUNT_DIR}/ca.crt"
    served_models: Annotated[
        tuple[str, ...],
        Meta(description="models of this pool, known before any replica is: 503 instead of 404, and listed by /v1/models"),
    ] = ()
    ready_without_replicas: Annotated[
        bool,
        Meta(description="ready once the members are known, even if none can be used: for routers apart from replicas"),
    ] = False
    engine_key_file: Annotated[
        str, Meta(description="file whose first line is the pool's key for engines and agents; empty: none is sent")
    ] = ""

    # Listening
    host: Annotated[str, Meta(description="address for clients")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="port for clients; 0: any free one")] = names.ROUTER_PORT
    admin_host: Annotated[str, Meta(description="address for metrics, health, state and explain")] = "127.0.0.1"
    admin_port: Annotated[Port, Meta(description="port for metrics, health, state and explain; 0: any free one")] = (
        names.ROUTER_ADMIN_PORT
    )
    workers: Annotated[int, Meta(description="processes that share the client port", ge=1, le=64)] = 1
    name: Annotated[str, Meta(description="how agents and logs call this router; empty: host name and process id")] = ""

    tls_cert_file: Annotated[
        str, Meta(description="certificate chain (PEM) for clients, read again when it changes; empty: plain HTTP")
    ] = ""
    tls_key_file: Annotated[str, Meta(description="private key (PEM) of the certificate")] = ""

    # Clients
    keys_file: Annotated[
        str,
        Meta(
            description="API keys, one a line: `sha256 scope [allow=field,...] [reserve=seconds]`, read again on change; "
            "empty: one scope"
        ),
    ] = ""
    salt_key_file: Annotated[
        str, Meta(description="secret from which each scope's cache salt is made, the same for all routers; empty: no salt")
    ] = ""
    policy_header: Annotated[
        bool,
        Meta(description="let every client choose the policy by x-prefixpool-policy; else only keys with allow=policy may"),
    ] = False
    engine_store: Annotated[
        bool,
        Meta(
            description="engines keep stored responses: let requests to /v1/responses use them; each engine knows its own "
            "only, so this is for pools of one replica"
        ),
    ] = False
    max_body_bytes: Annotated[int, Meta(description="longest request body", ge=1024)] = 16 << 20
    max_buffered_bytes: Annotated[
        int,
        Meta(description="request bodies held in memory by one process; more get 429; at least `max_body_bytes`", ge=1024),
    ] = 512 << 20
    max_inflight: Annotated[
        Count, Meta(description="requests served at once, divided evenly among `workers`, at least 1 each; 0: no limit")
    ] = 0
    max_queued: Annotated[
        Count, Meta(description="requests that may wait for a place, here or in a replica; more get 429")
    ] = 1024
    queue_timeout_s: Annotated[float, Meta(description="how long one may wait for a place before it gets 429", gt=0)] = 30.0
    body_timeout_s: Annotated[float, Meta(description="for a request's body to arrive", gt=0)] = 60.0
    idle_timeout_s: Annotated[
        float, Meta(description="for a client's TLS handshake, its next request, or the whole head of one, to arrive", gt=0)
    ] = 75.0
    write_timeout_s: Annotated[
        float, Meta(description="how long a client may take nothing of its answer before it is cut off", gt=0)
    ] = 60.0
    connect_timeout_s: Annotated[float, Meta(description="to reach an engine before another is tried", gt=0)] = 5.0
    silence_timeout_s: Annotated[
        float, Meta(description="how long an engine may send nothing, before its answer or in the middle of it", gt=0)
    ] = 600.0
    files_interval_s: Annotated[float, Meta(description="between two looks at key and certificate files", gt=0)] = 2.0

    # Routing
    policy: Annotated[str, Meta(description="prefix, chwbl, least_load, round_robin, random or session", min_length=1)] = (
        "prefix"
    )
    index_bytes: Annotated[
        int, Meta(description="memory for the prefix index; beyond it the least useful boundaries go first", ge=1 << 20)
    ] = 256 << 20
    history_ttl_s: Annotated[
        Seconds, Meta(description="how long a replica without agent is believed to hold what was sent there; 0: not at all")
    ] = 300.0
    agent_grace_s: Annotated[
        Seconds, Meta(description="how long a replica's agent may be missing before the replica is used without it")
    ] = 4.0
    warmup_s: Annotated[
        Seconds, Meta(description="how long a new router waits, not ready, for the first picture of every replica's cache")
    ] = 5.0
    probe_interval_s: Annotated[
        float, Meta(description="between two health probes of a replica that has no agent or is down", gt=0)
    ] = 1.0

    # Stopping
    drain_accept_s: Annotated[
        Seconds, Meta(description="after SIGTERM: not ready, but still accepting, until everyone has noticed")
    ] = 5.0
    drain_timeout_s: Annotated[Seconds, Meta(description="how long running answers may then take to end")] = 60.0

    # Telling
    explain_last: Annotated[int, Meta(description="decisions kept for /explain", ge=0, le=100_000)] = 512
    access_log: Annotated[
        bool,
        Meta(
            description="one line at level info for each request that has ended: whose, where, tokens, times; never its text"
        ),
    ] = False
    log_level: Annotated[LogLevel, Meta(description="least severe line that is written")] = LogLevel.INFO
    log_format: Annotated[LogFormat, Meta(description="of log lines")] = LogFormat.TEXT
