"""Engine arguments of the user's: those that would undo ours are refused, with the reason. Pure.

The operator asks before it accepts a spec, the worker before it starts an engine (research: vllm.md 1, 6).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from prefixpool.errors import SettingsError


class Rules(NamedTuple):
    """What is refused. Long options by full name; one-dash options by how they begin, as argparse reads them."""

    long: Mapping[str, str]  # "--port" -> reason
    short: Mapping[str, str]  # "-tp" -> reason


_WORKER: Final = "the worker sets it, from its setting {}"
_OURS: Final = "the worker sets it"
_TLS: Final = "engines speak plain HTTP to agent and router; TLS is the router's"
_RANKS: Final = "data parallel ranks in one engine are not supported; run more replicas"
_NODES: Final = "an engine on several machines is not supported"
_PROMPTS: Final = "prompts would be written to the log"

VLLM: Final = Rules(
    long={
        "--model": _WORKER.format("model"),
        "--revision": _WORKER.format("revision"),
        "--served-model-name": _WORKER.format("served_model_name"),
        "--host": _WORKER.format("host"),
        "--port": _WORKER.format("engine_port"),
        "--tensor-parallel-size": _WORKER.format("tensor_parallel"),
        "--pipeline-parallel-size": _WORKER.format("pipeline_parallel"),
        "--max-model-len": _WORKER.format("max_model_len"),
        "--block-size": _WORKER.format("block_tokens"),
        "--num-gpu-blocks-override": _WORKER.format("device_blocks"),
        "--kv-cache-memory-bytes": _WORKER.format("kv_cache_bytes"),
        "--gpu-memory-utilization": _WORKER.format("memory_utilization_percent"),
        "--max-num-seqs": _WORKER.format("max_num_seqs"),
        "--dtype": _WORKER.format("dtype"),
        "--kv-cache-dtype": _WORKER.format("kv_cache_dtype"),
        "--enforce-eager": _WORKER.format("enforce_eager"),
        "--kv-events-config": "the agent reads KV events from sockets in the run directory",
        "--kv-transfer-config": _WORKER.format("host_kv_bytes"),
        "--kv-offloading-size": _WORKER.format("host_kv_bytes"),
        "--kv-offloading-backend": _WORKER.format("host_kv_bytes"),
        "--enable-prefix-caching": "without prefix caching there is nothing to route by",
        "--prefix-caching-hash-algo": "agents and tiers rely on the default",
        "--enable-prompt-tokens-details": "the router compares cached tokens with its prediction",
        "--enable-request-id-headers": _OURS,
        "--middleware": "the gate is the one middleware; another could let requests pass it",
        "--api-key": "the gate checks the pool's engine key; clients' keys are the router's",
        "--root-path": "paths must be those that the gate knows",
        "--uds": "agent and router reach the engine by TCP",
        "--grpc": "the gate guards HTTP only",
        "--grpc-port": "the gate guards HTTP only",
        "--api-server-count": "vLLM would pass it over: one process answers clients; run more replicas",
        "--headless": "an engine without API server cannot be reached",
        "--config": "a file of options could undo the worker's; give them one by one",
        "--shutdown-timeout": "the agent drains before it stops the engine; vLLM's own wait can hang for ever",
        "--ssl-keyfile": _TLS,
        "--ssl-certfile": _TLS,
        "--ssl-ca-certs": _TLS,
        "--ssl-cert-reqs": _TLS,
        "--ssl-ciphers": _TLS,
        "--enable-ssl-refresh": _TLS,
        "--data-parallel-size": _RANKS,
        "--data-parallel-size-local": _RANKS,
        "--data-parallel-rank": _RANKS,
        "--data-parallel-start-rank": _RANKS,
        "--data-parallel-address": _RANKS,
        "--data-parallel-rpc-port": _RANKS,
        "--data-parallel-backend": _RANKS,
        "--data-parallel-hybrid-lb": _RANKS,
        "--data-parallel-external-lb": _RANKS,
        "--data-parallel-multi-port-external-lb": _RANKS,
        "--data-parallel-supervisor-port": _RANKS,
        "--enable-elastic-ep": _RANKS,
        "--nnodes": _NODES,
        "--node-rank": _NODES,
        "--master-addr": _NODES,
        "--master-port": _NODES,
        "--enable-log-requests": _PROMPTS,
        "--enable-log-outputs": _PROMPTS,
        "--enable-log-deltas": _PROMPTS,
    },
    short={
        "-dp": _RANKS,
        "-n": _NODES,
        "-r": _NODES,
        "-tp": _WORKER.format("tensor_parallel"),
        "-pp": _WORKER.format("pipeline_parallel"),
    },
)

SIM: Final = Rules(
    long={
        flag: VLLM.long[flag]
        for flag in (
            "--model",
            "--served-model-name",
            "--host",
            "--port",
            "--block-size",
            "--num-gpu-blocks-override",
            "--max-model-len",
            "--max-num-seqs",
            "--kv-transfer-config",
            "--kv-events-config",
            "--middleware",
        )
    },
    short={},
)


def split(text: str) -> tuple[str, ...]:
    """Words of a shell-quoted string. Raises SettingsError."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise SettingsError(f"--engine-args={text!r}: {error}; quote as in a shell") from error


def check(arguments: Sequence[str], rules: Rules) -> None:
    """Raises SettingsError that names the argument and says why it is refused and what to use instead."""
    for argument in arguments:
        reason = _reason(argument, rules)
        if reason is not None:
            raise SettingsError(f"engine argument {argument.partition('=')[0]} is refused: {reason}")


def _reason(argument: str, rules: Rules) -> str | None:
    if argument == "--":
        return "what follows it would not be read as options"
    if argument.startswith("--"):
        return _long_reason(argument, rules.long)
    if re.match(r"-[A-Za-z]", argument):
        return next((reason for start, reason in rules.short.items() if argument.startswith(start)), None)
    return None


def _long_reason(argument: str, refused: Mapping[str, str]) -> str | None:
    name = re.split(r"[=.+]", argument, maxsplit=1)[0].replace("_", "-")  # --kv-events-config.endpoint=... sets a part of it
    for option, reason in refused.items():
        if name == option or name == "--no-" + option[2:]:
            return reason
        if option.startswith(name):
            return f"it can be read as short for {option}; write option names in full"
    return None
