"""The container of engine and agent, with the worker's supervisor as its first process."""

from __future__ import annotations

import shlex
from typing import Any, Final

from prefixpool import names
from prefixpool.api.engine import EnvVar
from prefixpool.api.spec import PoolSpec
from prefixpool.listening import EVERYWHERE
from prefixpool.sizing.kv import KvDtype
from prefixpool_operator.identity import KEY_ENGINE
from prefixpool_operator.observed import Raw
from prefixpool_operator.render import volumes
from prefixpool_operator.render.blueprint import ENGINE_STOP_S, Blueprint
from prefixpool_operator.render.container import SECURITY, from_field, from_secret, http_get, resources, variables

NAME: Final = "worker"
PREFIX: Final = "PREFIXPOOL_WORKER"
_COMMAND: Final = "prefixpool-worker"
_SIM_MEMORY: Final = 1 << 30
_STARTS: Final = 5  # the supervisor gives up after so many; the kubelet shall not interfere before
_OR_DOWNLOADING: Final = "?download=1"
_PROBE_S: Final = 5
_SCRATCH: Final = 4 << 30  # compiled kernels and graphs
_LEAST_INFLIGHT: Final = 256
_KV_DTYPES: Final = {KvDtype.AUTO: None, KvDtype.BF16: "bfloat16", KvDtype.FP8: "fp8"}


def container(plan: Blueprint) -> Raw:
    """Readiness needs a router that knows the replica's cache; there is no liveness probe, because the supervisor restarts
    engine and agent by itself, and a restart of the container would load the model again. Nor does the kubelet end a start
    whose download has begun: that may take any time, and what does not come up behind it, the supervisor gives up."""
    starts = plan.startup_s * _STARTS // _PROBE_S + 1
    started = f"{names.PATH_READYZ}{_OR_DOWNLOADING if plan.downloads else ''}"
    return {
        "name": NAME,
        "image": plan.worker_image,
        "imagePullPolicy": plan.settings.image_pull_policy,
        "command": [_COMMAND],
        "env": _environment(plan),
        "ports": [
            {"name": "engine", "containerPort": names.ENGINE_PORT, "protocol": "TCP"},
            {"name": "agent", "containerPort": names.AGENT_PORT, "protocol": "TCP"},
        ],
        "resources": _resources(plan),
        "startupProbe": http_get(started, "agent", period_s=_PROBE_S, failures=starts),
        "readinessProbe": http_get(f"{names.PATH_READYZ}?router=1", "agent", period_s=2, failures=3),
        "lifecycle": {"preStop": {"exec": {"command": [_COMMAND, "drain"]}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": SECURITY,
        "volumeMounts": volumes.worker_mounts(plan),
    }


def _environment(plan: Blueprint) -> list[Raw]:
    return merged(
        from_field(f"{PREFIX}_REPLICA", "metadata.name"),
        *variables(PREFIX, _settings(plan)),
        {"name": "HOME", "value": volumes.HOME},
        {"name": "USER", "value": "prefixpool"},  # torch asks for a name, and the user id has none in the image
        *([{"name": "HF_HUB_CACHE", "value": volumes.CACHE}] if plan.spec.model.cache else []),
        *given(plan.spec),
    )


def merged(*found: Raw) -> list[Raw]:
    """Of two variables with one name the last counts; the API server takes each name once."""
    return list({one["name"]: one for one in found}.values())


def given(spec: PoolSpec) -> list[Raw]:
    """Variables of the spec, behind the token for its model."""
    token = spec.model.token_secret
    return [*([from_secret("HF_TOKEN", token, "token")] if token else []), *map(_given, spec.engine.env)]


def _given(one: EnvVar) -> Raw:
    if one.value_from is not None:
        return from_secret(one.name, one.value_from.secret_key_ref.name, one.value_from.secret_key_ref.key)
    return {"name": one.name, "value": one.value or ""}


def _settings(plan: Blueprint) -> dict[str, Any]:
    """Names are those of the worker's settings; None leaves its default."""
    spec = plan.spec
    return {
        "run_dir": f"{volumes.RUN}/w",
        "model": spec.model.source,
        "revision": spec.model.revision,
        "served_model_name": spec.model.name,
        "engine": spec.engine.kind.value,
        "engine_key_file": f"{volumes.KEYS}/{KEY_ENGINE}",
        "host": EVERYWHERE,
        "device": "cpu" if spec.accelerator.on_cpu else "cuda",
        "tensor_parallel": spec.accelerator.tensor_parallel,
        "pipeline_parallel": spec.accelerator.pipeline_parallel,
        "max_model_len": spec.engine.max_model_len,
        "block_tokens": spec.engine.block_size,
        "max_num_seqs": spec.engine.max_num_seqs,
        "max_inflight": max(_LEAST_INFLIGHT, plan.sizing.sequences_per_step),  # fewer would leave room in its batches
        "kv_cache_dtype": _KV_DTYPES[spec.kv_cache.dtype],
        "memory_utilization_percent": spec.kv_cache.memory_utilization_percent,
        "device_blocks": plan.sizing.device_per_replica.blocks if plan.simulated else None,
        "kv_cache_bytes": _kv_bytes(plan),
        **_tiers(plan),
        "startup_timeout_s": plan.startup_s,
        "stop_timeout_s": ENGINE_STOP_S,
        "drain_timeout_s": plan.drain_s,
        "engine_args": shlex.join(_arguments(plan)) or None,
        "log_files": False,
    }


def _kv_bytes(plan: Blueprint) -> int | None:
    """On CPUs the engine cannot measure what is left for KV: it takes what the plan says."""
    on_cpu = plan.spec.accelerator.on_cpu and not plan.simulated
    return plan.sizing.device_per_replica.bytes if on_cpu else None


def _tiers(plan: Blueprint) -> dict[str, Any]:
    cache = plan.spec.kv_cache
    found: dict[str, Any] = {}
    if cache.host is not None:
        found |= {
            "host_kv_bytes": int(cache.host.memory),
            "kv_eviction": cache.eviction.value if cache.eviction else None,
        }
    if cache.disk is not None:
        shared = cache.disk.shared_claim_name is not None
        found |= {"disk_kv_dir": volumes.DISK, "disk_kv_bytes": int(cache.disk.size), "disk_kv_shared": shared}
    return found


def _arguments(plan: Blueprint) -> list[str]:
    """Of the engine, beyond what the worker has settings for."""
    model = plan.spec.model
    found = ["--trust-remote-code"] if model.trust_remote_code else []
    if model.adapters:
        found += ["--enable-lora", "--lora-modules", *(f"{one.name}={one.source}" for one in model.adapters)]
    return [*([] if plan.simulated else found), *plan.spec.engine.extra_args]


def _resources(plan: Blueprint) -> Raw:
    """Memory is both request and limit: pages of the host tier are touched at start and are never given back.

    Devices wait for the engine's threads: one drives each of them, one more schedules and answers. Who asks for no core gets
    what the other pods of a busy node leave.
    """
    memory = _SIM_MEMORY if plan.simulated else plan.sizing.host_needs.memory
    requests: dict[str, Any] = {"memory": memory}
    if scratch := _scratch_bytes(plan):
        requests["ephemeral-storage"] = scratch
    limits: dict[str, Any] = {"memory": memory}
    accelerator = plan.spec.accelerator
    if not accelerator.on_cpu:
        requests[accelerator.resource] = limits[accelerator.resource] = accelerator.devices
        if not plan.simulated:
            requests["cpu"] = accelerator.devices + 1
    return resources(plan.spec.engine.resources, requests, limits)


def _scratch_bytes(plan: Blueprint) -> int:
    """On the node's own disk."""
    disk = plan.spec.kv_cache.disk
    own = disk is not None and not disk.storage_class_name and not disk.shared_claim_name
    tier = volumes.disk_volume_bytes(disk.size) if disk is not None and own else 0
    return (0 if plan.simulated else _SCRATCH) + tier + (plan.sizing.weights_bytes if plan.downloads_alone else 0)
