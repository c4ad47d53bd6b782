"""Settings of the worker and of the agent. The worker derives the agent's from its own (worker.py)."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from prefixpool import names
from prefixpool.api.engine import EngineKind
from prefixpool.api.kv_cache import Eviction
from prefixpool.logs import LogLevel

WORKER_PREFIX: Final = "PREFIXPOOL_WORKER"
AGENT_PREFIX: Final = "PREFIXPOOL_AGENT"

Port = Annotated[int, Meta(ge=1, le=65535)]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]
ReplicaName = Annotated[str, Meta(description="identity of this replica, `<pool>-<ordinal>`", pattern=names.REPLICA_NAME)]


class Device(StrEnum):
    """What the engine computes on."""

    CUDA = "cuda"
    CPU = "cpu"


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One worker: a supervisor, an engine, an agent. Flags behind `--` go to the engine as they are."""

    replica: ReplicaName
    run_dir: Annotated[
        str, Meta(description="directory for sockets, state and logs; made with mode 0700; a short path", min_length=1)
    ]
    model: Annotated[
        str, Meta(description="folder of the model, or its name on the Hub (`organisation/name`)", min_length=1)
    ]
    engine_key_file: Annotated[
        str, Meta(description="file with the pool's engine key (one a line while keys are being rotated)", min_length=1)
    ]
    revision: Annotated[str, Meta(description="branch, tag or commit on the Hub; empty: `main`")] = ""
    engine: Annotated[EngineKind, Meta(description="engine to run")] = EngineKind.VLLM
    served_model_name: Annotated[str, Meta(description="name that clients use; empty: last part of `model`")] = ""
    host: Annotated[str, Meta(description="address on which engine and agent listen")] = "127.0.0.1"
    engine_port: Annotated[Port, Meta(description="port of the engine")] = names.ENGINE_PORT
    agent_port: Annotated[Port, Meta(description="port of the agent")] = names.AGENT_PORT
    device: Annotated[Device, Meta(description="what the engine computes on")] = Device.CUDA
    tensor_parallel: Annotated[int, Meta(description="devices that share each layer", ge=1)] = 1
    pipeline_parallel: Annotated[int, Meta(description="devices that share the layers", ge=1)] = 1
    max_model_len: Annotated[Count, Meta(description="longest prompt plus answer, in tokens; 0: what the model says")] = 0
    block_tokens: Annotated[
        Count, Meta(description="tokens of a KV block; 0: the engine's own choice on cuda, 32 on cpu and sim")
    ] = 0
    device_blocks: Annotated[Count, Meta(description="KV blocks on the device, the null block included; 0: by memory")] = 0
    kv_cache_bytes: Annotated[Count, Meta(description="bytes of KV cache on each device; 0: the engine's own choice")] = 0
    memory_utilization_percent: Annotated[
        int, Meta(description="share of device memory that the engine may use; 0: its own default", ge=0, le=100)
    ] = 0
    host_kv_bytes: Annotated[
        Count, Meta(description="bytes of host memory for KV blocks, the tier below the device; 0: none")
    ] = 0
    disk_kv_dir: Annotated[
        str, Meta(description="directory for KV blocks on disk, the tier below host memory; empty: none")
    ] = ""
    disk_kv_bytes: Annotated[Count, Meta(description="bytes that KV blocks may take on disk")] = 0
    disk_kv_shared: Annotated[bool, Meta(description="other replicas use `disk_kv_dir`, too")] = False
    disk_kv_free_bytes: Annotated[Count, Meta(description="bytes of the disk that are left free for others")] = 1 << 30
    disk_kv_deadline_s: Annotated[
        float, Meta(description="how long a request waits for the disk before its prompt is computed instead", gt=0)
    ] = 2.0
    kv_eviction: Annotated[Eviction, Meta(description="what goes first when the host tier is full")] = Eviction.WORTH
    max_num_seqs: Annotated[Count, Meta(description="sequences in one step; 0: the engine's own choice")] = 0
    max_inflight: Annotated[
        Count, Meta(description="requests inside the engine, beyond which the gate says busy; 0: no bound")
    ] = 256
    dtype: Annotated[str, Meta(description="weights and activations: auto, bfloat16, float16, float32")] = "auto"
    kv_cache_dtype: Annotated[str, Meta(description="KV cache: auto, or fp8 kinds that the engine knows")] = "auto"
    enforce_eager: Annotated[bool, Meta(description="no graphs or compilation: starts sooner, runs slower")] = False
    cpu_cores: Annotated[
        str,
        Meta(description="cores for the engine's threads, as `0-1`, of those that this process may use; empty: all of them"),
    ] = ""
    dev_mode: Annotated[bool, Meta(description="open `/reset_prefix_cache` (benchmarks, tests)")] = False
    startup_timeout_s: Annotated[
        Seconds,
        Meta(description="until the engine must answer, from the end of a download; 0: from the size of the weights"),
    ] = 0.0
    stop_timeout_s: Annotated[Seconds, Meta(description="from SIGTERM of the engine; 5 s later it is killed")] = 10.0
    drain_timeout_s: Annotated[Seconds, Meta(description="how long a drain waits for running requests")] = 60.0
    engine_args: Annotated[
        str, Meta(description="more engine arguments, quoted as in a shell; those that undo ours are refused")
    ] = ""
    log_files: Annotated[
        bool, Meta(description="engine and agent write to files in `run_dir`; false: to standard output, as in a container")
    ] = True
    log_level: Annotated[LogLevel, Meta(description="least severe line that the agent writes")] = LogLevel.INFO


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One agent; its sockets and files are those of the run directory (core `names.RUN_*`)."""

    replica: ReplicaName
    run_dir: Annotated[str, Meta(description="run directory shared with supervisor and engine", min_length=1)]
    engine_key_file: Annotated[
        str,
        Meta(description="file with the pool's engine key; the first line is sent, every line is accepted", min_length=1),
    ]
    model: Annotated[
        str,
        Meta(
            description="folder of the model: tokenizer and chat template are read from it; or its name on the Hub, "
            "from where the worker brings it",
            min_length=1,
        ),
    ]
    served_model_name: Annotated[str, Meta(description="name that clients use", min_length=1)]
    engine: Annotated[EngineKind, Meta(description="kind of engine")] = EngineKind.VLLM
    engine_url: Annotated[str, Meta(description="base URL of the engine, without a path")] = (
        f"http://127.0.0.1:{names.ENGINE_PORT}"
    )
    host: Annotated[str, Meta(description="address on which the agent listens")] = "127.0.0.1"
    agent_port: Annotated[Port, Meta(description="port of the agent")] = names.AGENT_PORT
    block_tokens: Annotated[Count, Meta(description="tokens of a KV block, as the engine was told; 0: its own choice")] = 0
    max_inflight: Annotated[Count, Meta(description="the gate's bound, as the engine was told; 0: none")] = 0
    host_kv_bytes: Annotated[Count, Meta(description="bytes of the host tier, as the engine was told; 0: none")] = 0
    disk_kv_bytes: Annotated[Count, Meta(description="bytes of the disk tier, as the engine was told; 0: none")] = 0
    disk_kv_shared: Annotated[bool, Meta(description="other replicas use the same disk, as the engine was told")] = False
    startup_timeout_s: Annotated[Seconds, Meta(description="until the engine must answer, from its start")] = 600.0
    engine_stop_timeout_s: Annotated[Seconds, Meta(description="from SIGTERM of the engine; 5 s later it is killed")] = 10.0
    drain_timeout_s: Annotated[Seconds, Meta(description="default time that a drain waits for running requests")] = 60.0
    drain_ack_s: Annotated[Seconds, Meta(description="how long a drain waits for routers to acknowledge the fence")] = 2.0
    scrape_interval_s: Annotated[Seconds, Meta(description="between two reads of the engine's metrics")] = 1.0
    text_bytes: Annotated[int, Meta(description="bound for contents of live requests that the agent holds", ge=1 << 20)] = (
        256 << 20
    )
    save_interval_s: Annotated[Seconds, Meta(description="between two saves of the residency map; 0: never")] = 5.0
    log_level: Annotated[LogLevel, Meta(description="least severe line that is written")] = LogLevel.INFO


class DrainSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`prefixpool-worker drain`: the worker's own settings, as far as they matter to it."""

    engine_key_file: Annotated[str, Meta(description="file with the pool's engine key", min_length=1)]
    host: Annotated[str, Meta(description="address on which the agent listens")] = "127.0.0.1"
    agent_port: Annotated[Port, Meta(description="port of the agent")] = names.AGENT_PORT
    drain_timeout_s: Annotated[Seconds, Meta(description="how long running requests may take to end")] = 60.0
