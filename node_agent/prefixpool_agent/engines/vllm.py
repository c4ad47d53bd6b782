"""vLLM 0.32: argument list and environment as a pure function of the settings (research: vllm.md 1, 6)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Final

from prefixpool import names
from prefixpool.engine_arguments import VLLM, check, split
from prefixpool.errors import SettingsError
from prefixpool.listening import reachable
from prefixpool_agent.engines import cpu_cores
from prefixpool_agent.engines.base import DeadlineRates, EngineSpec, Host, core_list, startup_deadline_s
from prefixpool_agent.settings import Device, WorkerSettings
from prefixpool_agent.tiers.connector import kv_transfer

MIDDLEWARE: Final = "prefixpool_agent.gate.Gate"
CPU_KV_BYTES: Final = 1 << 30  # else vLLM takes 90 % of the machine's memory, which on a laptop is not ours alone
_CPU_BLOCK_MULTIPLE: Final = 32
_ON_THE_HUB: Final = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_MORE_MODELS: Final = ("--lora-modules", "--speculative-config", "-sc", "--tokenizer", "--hf-config-path")
_MORE_CODE: Final = ("--trust-remote-code", "--code-revision")  # a repository may name another one's

# A start takes 27 s on two idle cores, twice that if Python may not keep what it compiles; 150 s were seen on busy ones.
# CUDA adds profiling, compilation, graphs.
_CPU_RATES: Final = DeadlineRates(base_s=600.0, bytes_per_s=50e6)
_CUDA_RATES: Final = DeadlineRates(base_s=900.0, bytes_per_s=100e6)


def vllm_spec(settings: WorkerSettings, host: Host) -> EngineSpec:
    """Raises SettingsError for settings or extra arguments that cannot work."""
    extra = split(settings.engine_args)
    check(extra, VLLM)
    block_tokens = _block_tokens(settings)
    served = settings.served_model_name or PurePath(settings.model).name
    rates = _CPU_RATES if settings.device is Device.CPU else _CUDA_RATES
    return EngineSpec(
        argv=(
            *_download(settings, host, extra),
            host.python,
            "-m",
            "vllm.entrypoints.openai.api_server",
            *_fixed(settings, served, block_tokens),
            *_optional(settings, host),
            *_tiers(settings, host),
            *extra,
        ),
        env=_env(settings, host, extra),
        url=f"http://{reachable(settings.host)}:{settings.engine_port}",
        served_model_name=served,
        block_tokens=block_tokens,
        startup_timeout_s=settings.startup_timeout_s or startup_deadline_s(host.weight_bytes, rates),
    )


def _download(settings: WorkerSettings, host: Host, extra: Sequence[str]) -> tuple[str, ...]:
    """A model on the Hub is brought here first, by a program that then becomes the engine."""
    if not downloaded(settings, host):
        return ()
    offline = () if _has_any(extra, (*_MORE_MODELS, *_MORE_CODE)) else ("--then-offline",)
    order = ("--model", settings.model, "--revision", settings.revision or "main", "--run-dir", settings.run_dir)
    return (host.python, "-m", "prefixpool_agent.download", *order, *offline, "--")


def downloaded(settings: WorkerSettings, host: Host) -> bool:
    """Whether the model is named as the Hub names it. Buckets, `name:format` and the like are left to the engine."""
    return host.weight_bytes is None and bool(_ON_THE_HUB.fullmatch(settings.model))


def _has_any(extra: Sequence[str], flags: Sequence[str]) -> bool:
    """In any spelling: adapters, draft models, other tokenizers may be repositories on the Hub as well."""
    return any(one.partition("=")[0].partition(".")[0].replace("_", "-") in flags for one in extra)


def _block_tokens(settings: WorkerSettings) -> int:
    """0: the engine's own choice. On CUDA it takes the size that the best kernels for model and device want; one that is
    given rules out all kernels that cannot have it, and for some models that is all of them.
    """
    if settings.device is Device.CUDA:
        return settings.block_tokens
    tokens = settings.block_tokens or _CPU_BLOCK_MULTIPLE
    if tokens % _CPU_BLOCK_MULTIPLE:
        raise SettingsError(f"block_tokens={tokens}: vLLM on CPU needs a multiple of {_CPU_BLOCK_MULTIPLE}")
    return tokens


def _fixed(settings: WorkerSettings, served: str, block_tokens: int) -> list[str]:
    return [
        *("--model", settings.model, "--served-model-name", served),
        *("--host", settings.host, "--port", str(settings.engine_port)),
        *(("--block-size", str(block_tokens)) if block_tokens else ()),
        "--enable-prefix-caching",
        *("--kv-events-config", json.dumps(kv_events(settings.run_dir))),
        *("--middleware", MIDDLEWARE),
        "--enable-prompt-tokens-details",  # else usage says nothing of cached tokens
        "--enable-request-id-headers",
        *("--disable-access-log-for-endpoints", "/health,/metrics"),  # the agent asks every second
        *("--tensor-parallel-size", str(settings.tensor_parallel)),
        *("--pipeline-parallel-size", str(settings.pipeline_parallel)),
        *("--dtype", settings.dtype, "--kv-cache-dtype", settings.kv_cache_dtype),
    ]


def kv_events(run_dir: str) -> dict[str, object]:
    """ipc only: events carry token ids. A full queue would block the scheduler, hence the large bounds."""
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{run_dir}/{names.RUN_KV_PUB}",
        "replay_endpoint": f"ipc://{run_dir}/{names.RUN_KV_REPLAY}",
        "topic": "kv",
        "buffer_steps": 10_000,
        "hwm": 100_000,
        "max_queue_size": 100_000,
    }


def _optional(settings: WorkerSettings, host: Host) -> list[str]:
    kv_bytes = settings.kv_cache_bytes
    if settings.device is Device.CPU and not kv_bytes and not settings.memory_utilization_percent:
        kv_bytes = CPU_KV_BYTES
    options: list[str] = []
    for flag, value in (
        ("--max-model-len", settings.max_model_len),
        ("--num-gpu-blocks-override", settings.device_blocks),
        ("--kv-cache-memory-bytes", kv_bytes),
        ("--max-num-seqs", settings.max_num_seqs),
    ):
        if value:
            options += [flag, str(value)]
    if settings.memory_utilization_percent:
        options += ["--gpu-memory-utilization", f"{settings.memory_utilization_percent / 100:g}"]
    if settings.enforce_eager:
        options.append("--enforce-eager")
    if settings.revision and host.weight_bytes is None and not downloaded(settings, host):
        options += ["--revision", settings.revision]
    return options


def _tiers(settings: WorkerSettings, host: Host) -> list[str]:
    config = kv_transfer(settings, host.shm_bytes)
    return ["--kv-transfer-config", json.dumps(config)] if config else []


def _env(settings: WorkerSettings, host: Host, extra: Sequence[str]) -> dict[str, str]:
    env = {
        names.ENV_RUN_DIR: settings.run_dir,
        names.ENV_ENGINE_KEY_FILE: settings.engine_key_file,
        names.ENV_MAX_INFLIGHT: str(settings.max_inflight),
        "VLLM_API_KEY": "",  # one inherited from the user's shell would refuse the pool's key
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "1",
        "VLLM_DEBUG_LOG_API_SERVER_RESPONSE": "0",
        "VLLM_SERVER_DEV_MODE": "1" if settings.dev_mode else "0",
        "VLLM_HOST_IP": "127.0.0.1",  # its processes talk to each other; there are no other machines
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_RPC_BASE_PATH": settings.run_dir,  # vLLM never removes its sockets: where the run directory goes, they go
    }
    if host.weight_bytes is not None and not _has_any(extra, _MORE_MODELS):
        env["HF_HUB_OFFLINE"] = "1"  # the model is a folder: nothing is to be fetched
    if settings.device is Device.CPU:
        # "auto" keeps one core back, which on two cores doubles the time of a prefill (research: vllm.md 4.2).
        own = "auto" if settings.tensor_parallel > 1 else core_list(host.cores)
        given = settings.cpu_cores and cpu_cores.checked(settings.cpu_cores, host.cores, settings.tensor_parallel)
        env["VLLM_CPU_OMP_THREADS_BIND"] = given or own
    return env
