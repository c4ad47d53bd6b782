"""What a local pool is made of, and the command lines that follow from it. Pure."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from prefixpool.api.engine import EngineKind
from prefixpool_agent.settings import Device


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A pool on one machine. Ports of 0 mean any free one; counts of 0 mean the program's own default."""

    model: str
    engine: EngineKind = EngineKind.VLLM
    name: str = "local"  # replicas are called `<name>-<ordinal>`
    served_model_name: str = ""
    replicas: int = 2
    routers: int = 1  # router programs, each on a port of its own
    router_workers: int = 1  # processes of each router program
    host: str = "127.0.0.1"
    port: int = 0
    admin_port: int = 0
    policy: str = "prefix"
    agents: bool = True  # False: routers are not told of the agents, hence know no residency
    device: Device = Device.CPU
    gpus: tuple[str, ...] = ()  # on cuda: names as in CUDA_VISIBLE_DEVICES, one for each replica
    block_tokens: int = 0
    device_blocks: int = 0
    kv_cache_bytes: int = 0
    max_model_len: int = 0
    dev_mode: bool = False
    enforce_eager: bool = True  # a laptop rather starts soon
    startup_timeout_s: float = 0.0  # 0: as long as the worker gives its engine, by the size of the weights
    engine_args: str = ""
    worker_args: tuple[str, ...] = ()
    router_args: tuple[str, ...] = ()
    env: dict[str, str] = {}  # for every process, added to this one's environment
    keep_logs: str = ""  # folder to which logs are copied when the pool stops; empty: they go with the run directory

    @property
    def model_name(self) -> str:
        """What clients write as `model`."""
        return self.served_model_name or Path(self.model).name


class Ports(NamedTuple):
    """Where one replica listens, on loopback."""

    engine: int
    agent: int


class MemberRow(NamedTuple):
    """One replica, as routers are told of it."""

    name: str
    engine_url: str
    agent_url: str
    state: str = "ready"


def worker_argv(spec: PoolSpec, name: str, run_dir: Path, key_file: Path, ports: Ports, cores: str) -> list[str]:
    """The command line of one worker."""
    flags: dict[str, Any] = {
        "replica": name,
        "run-dir": run_dir,
        "model": spec.model,
        "engine": spec.engine.value,
        "served-model-name": spec.model_name,
        "engine-key-file": key_file,
        "engine-port": ports.engine,
        "agent-port": ports.agent,
        "device": spec.device.value,
    }
    counts = {
        "block-tokens": spec.block_tokens,
        "device-blocks": spec.device_blocks,
        "kv-cache-bytes": spec.kv_cache_bytes,
        "max-model-len": spec.max_model_len,
        "startup-timeout-s": spec.startup_timeout_s,
    }
    flags |= {flag: count for flag, count in counts.items() if count}
    flags |= {flag: "true" for flag, on in (("dev-mode", spec.dev_mode), ("enforce-eager", spec.enforce_eager)) if on}
    if cores:
        flags["cpu-cores"] = cores
    if spec.engine_args:
        flags["engine-args"] = spec.engine_args
    return [sys.executable, "-m", "prefixpool_agent.worker", *_flags(flags), *spec.worker_args]


def router_argv(spec: PoolSpec, name: str, members: Path, key_file: Path, ports: tuple[int, int]) -> list[str]:
    """The command line of one router; `ports`: for clients, and of the admin side."""
    flags = {
        "members": members,
        "engine-key-file": key_file,
        "host": spec.host,
        "port": ports[0],
        "admin-port": ports[1],
        "workers": spec.router_workers,
        "policy": spec.policy,
        "name": name,
        "members-interval-s": 0.1,
        "drain-accept-s": 0,  # on one machine nobody else has to notice first
        "drain-timeout-s": 5,
    }
    return [sys.executable, "-m", "prefixpool_router.main", *_flags(flags), *spec.router_args]


def members_json(rows: Sequence[MemberRow], *, agents: bool) -> bytes:
    """The member file of the routers."""
    return msgspec.json.encode(
        [
            {"name": row.name, "engine": row.engine_url, "agent": row.agent_url if agents else None, "state": row.state}
            for row in rows
        ]
    )


def gpu_env(spec: PoolSpec, ordinal: int) -> dict[str, str]:
    """Environment that gives a replica its own accelerator; empty on CPUs."""
    return {"CUDA_VISIBLE_DEVICES": spec.gpus[ordinal % len(spec.gpus)]} if spec.gpus else {}


def _flags(values: dict[str, Any]) -> list[str]:
    return [f"--{flag}={value}" for flag, value in values.items()]
