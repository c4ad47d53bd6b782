"""Every name that crosses a process boundary: HTTP headers, paths, ports, environment, files of a run directory.

Declared once, because router, gate, agent and charts must agree on them letter by letter.
"""

from typing import Final

# Names of replicas stand in headers, metrics and file names; a router refuses a member whose name is any other.
REPLICA_NAME: Final = r"\A[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?\Z"

# Response headers of the router.
H_REPLICA: Final = "x-prefixpool-replica"  # identity of the replica that answered, `<pool>-<ordinal>`
H_REASON: Final = "x-prefixpool-reason"  # why it was chosen: one word of policy.base.Reason
H_PREDICTED: Final = "x-prefixpool-predicted-tokens"  # fixed before the engine answers
H_CACHED: Final = "x-prefixpool-cached-tokens"  # actual; only on answers that are not streamed
H_REQUEST_ID: Final = "x-request-id"

SERVER: Final = "prefixpool"  # value of `server` on answers of ours; versions are nobody's business

# Request headers that the router reads.
H_POLICY: Final = "x-prefixpool-policy"  # where the pool allows it
H_SESSION: Final = "x-session-id"  # for the `session` policy; never forwarded, the gate sets its own

# Set by the gate on 503 answers; both mean: nothing was done, another replica may be tried.
H_FENCED: Final = "x-prefixpool-fenced"
H_BUSY: Final = "x-prefixpool-busy"

# Default ports. In a pod, all containers share one network namespace.
ROUTER_PORT: Final = 8000
ROUTER_ADMIN_PORT: Final = 8001
ENGINE_PORT: Final = 8100
AGENT_PORT: Final = 8101

# Where Kubernetes puts what a pod needs to ask its API server: token, ca.crt, namespace.
SERVICE_ACCOUNT_DIR: Final = "/var/run/secrets/kubernetes.io/serviceaccount"

# The agent's control API.
PATH_STREAM: Final = "/stream"  # WebSocket, see wire.py
PATH_INFO: Final = "/info"
PATH_DRAIN: Final = "/drain"
PATH_HEALTHZ: Final = "/healthz"
PATH_READYZ: Final = "/readyz"
PATH_METRICS: Final = "/metrics"

PATH_HEALTH: Final = "/health"  # of engines, and of routers on the port for clients, where load balancers look

# Files and sockets of one worker's run directory (0700). Unix socket paths end at 107 bytes: keep the directory short.
RUN_GATE_STATE: Final = "gate.state"  # shared fence and in-flight counts, see gate.py
RUN_NOTES_SOCK: Final = "notes.sock"  # the agent listens, every API server process of the engine connects
RUN_KV_PUB: Final = "kv.pub"  # KV events (ipc only: they carry token ids)
RUN_KV_REPLAY: Final = "kv.replay"
RUN_SUPERVISOR_SOCK: Final = "supervisor.sock"
RUN_SUPERVISOR_STATE: Final = "supervisor.json"
RUN_ENGINE_LOG: Final = "engine.log"
RUN_AGENT_LOG: Final = "agent.log"
RUN_SAVED_MAP: Final = "residency.map"
RUN_DISK_FOLDER: Final = "disk.folder"  # text: where the engine's chunks on disk are
RUN_DOWNLOAD: Final = "download.json"  # how far the model's download from the Hub is, and where its files are

# Environment that the worker gives to the engine process, for the gate inside it.
ENV_RUN_DIR: Final = "PREFIXPOOL_RUN_DIR"
ENV_EPOCH: Final = "PREFIXPOOL_EPOCH"  # one engine start; nanoseconds since 1970, so that it only grows
ENV_ENGINE_KEY_FILE: Final = "PREFIXPOOL_ENGINE_KEY_FILE"
ENV_MAX_INFLIGHT: Final = "PREFIXPOOL_MAX_INFLIGHT"
