"""The simulated engine: it takes the vLLM flags that it understands, and its own (ARCHITECTURE.md, "Engines")."""

from __future__ import annotations

import json
from pathlib import PurePath
from typing import Final

from prefixpool import names
from prefixpool.engine_arguments import SIM, check, split
from prefixpool.listening import reachable
from prefixpool_agent.engines.base import EngineSpec, Host
from prefixpool_agent.engines.vllm import MIDDLEWARE, kv_events
from prefixpool_agent.settings import WorkerSettings
from prefixpool_agent.tiers import connector

_BLOCK_TOKENS: Final = 32
_STARTUP_S: Final = 60.0

KV_TOKEN_BYTES: Final = 23_040  # SmolLM2-135M in bf16, to which the sim's times are fitted


def sim_spec(settings: WorkerSettings, host: Host) -> EngineSpec:
    """Raises SettingsError for extra arguments that undo ours."""
    extra = split(settings.engine_args)
    check(extra, SIM)
    connector.check(settings, shm_bytes=None)
    block_tokens = settings.block_tokens or _BLOCK_TOKENS
    served = settings.served_model_name or PurePath(settings.model).name
    argv = [
        *(host.python, "-m", "prefixpool_agent.sim.main"),
        *("--model", settings.model, "--served-model-name", served),
        *("--host", settings.host, "--port", str(settings.engine_port)),
        *("--block-size", str(block_tokens)),
        *("--kv-events-config", json.dumps(kv_events(settings.run_dir))),
        *("--middleware", MIDDLEWARE),
    ]
    block_bytes = KV_TOKEN_BYTES * block_tokens
    for flag, value in (
        ("--num-gpu-blocks-override", settings.device_blocks),
        ("--max-model-len", settings.max_model_len),
        ("--max-num-seqs", settings.max_num_seqs),
        ("--host-blocks", settings.host_kv_bytes // block_bytes),
    ):
        if value:
            argv += [flag, str(value)]
    if settings.disk_kv_dir:
        argv += [
            *("--disk-dir", settings.disk_kv_dir, "--disk-blocks", str(settings.disk_kv_bytes // block_bytes)),
            *("--disk-free-bytes", str(settings.disk_kv_free_bytes), "--disk-shared", str(settings.disk_kv_shared).lower()),
        ]
    return EngineSpec(
        argv=(*argv, *extra),
        env={
            names.ENV_RUN_DIR: settings.run_dir,
            names.ENV_ENGINE_KEY_FILE: settings.engine_key_file,
            names.ENV_MAX_INFLIGHT: str(settings.max_inflight),
            "VLLM_SERVER_DEV_MODE": "1" if settings.dev_mode else "0",
        },
        url=f"http://{reachable(settings.host)}:{settings.engine_port}",
        served_model_name=served,
        block_tokens=block_tokens,
        startup_timeout_s=settings.startup_timeout_s or _STARTUP_S,
    )
