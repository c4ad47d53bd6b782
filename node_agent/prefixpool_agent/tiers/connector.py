"""vLLM's `--kv-transfer-config` from the settings. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from prefixpool.api.kv_cache import Eviction
from prefixpool.engine_arguments import split
from prefixpool.errors import SettingsError
from prefixpool_agent.settings import Device, WorkerSettings

_TIERS: Final = "prefixpool_agent.tiers"
_SPECS: Final = {Device.CUDA: ("CudaHostSpec", "CudaHostDiskSpec"), Device.CPU: ("HostSpec", "HostDiskSpec")}


class DiskOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the disk tier is told (`disk_tier.DiskTier`)."""

    directory: str
    capacity_bytes: int
    free_bytes: int  # of the file system, left for others
    shared: bool  # other engines use the directory, too
    deadline_s: float  # of a read
    setup: str  # settings that change what is computed: chunks made with others are not read
    adapters: tuple[str, ...] = ()  # where those are that the engine was given, folders or names on the Hub


def kv_transfer(settings: WorkerSettings, shm_bytes: int | None = None) -> dict[str, Any] | None:
    """None: the device is the only tier. Raises SettingsError.

    On CUDA the copies between device and host are vLLM's own, on CPU ours (`specs`); what is above and below is the same.
    `shm_bytes` are free in /dev/shm, where vLLM keeps host memory that several of its processes use.
    """
    check(settings, shm_bytes)
    if not settings.host_kv_bytes:
        return None
    disk = _disk(settings)
    spec = _SPECS[settings.device][bool(disk)]
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": spec,
            "spec_module_path": f"{_TIERS}.specs",
            "cpu_bytes_to_use": settings.host_kv_bytes,
            "self_describing_kv_events": True,  # else events of these tiers name blocks only, without text or parent
            "offload_prompt_only": False,  # replies are the next turn's prompt
            **_eviction(settings.kv_eviction),
            **({"secondary_tiers": [disk]} if disk else {}),
        },
    }


def check(settings: WorkerSettings, shm_bytes: int | None) -> None:
    """Raises SettingsError for tiers that no engine could have."""
    if bool(settings.disk_kv_dir) != bool(settings.disk_kv_bytes):
        raise SettingsError("a disk tier needs both disk_kv_dir and disk_kv_bytes")
    if settings.disk_kv_dir and not settings.host_kv_bytes:
        raise SettingsError("a disk tier needs host_kv_bytes: all that goes to disk goes through host memory")
    in_shm = bool(settings.disk_kv_dir) or settings.device is Device.CUDA
    if in_shm and shm_bytes is not None and settings.host_kv_bytes > shm_bytes:
        raise SettingsError(
            f"host_kv_bytes={settings.host_kv_bytes}: only {shm_bytes} bytes are free in /dev/shm, where that tier is;"
            " mount a larger one there, or ask for less"
        )


def adapters(engine_args: Sequence[str]) -> tuple[str, ...]:
    """Their paths, from values of `--lora-modules` as vLLM takes them: `name=path`, or JSON with a `path`."""
    found: list[str] = []
    takes = False
    for word in engine_args:
        given = word
        if word.startswith("-"):
            flag, _, given = word.partition("=")
            takes = flag.replace("_", "-") == "--lora-modules"
        if takes and (path := _path(given)):
            found.append(path)
    return tuple(found)


def _path(given: str) -> str:
    """ "" for what the engine refuses."""
    try:
        return msgspec.json.decode(given, type=_Adapter).path
    except msgspec.DecodeError:
        return given.partition("=")[2]


class _Adapter(msgspec.Struct):
    path: str = ""


def _eviction(eviction: Eviction) -> dict[str, str]:
    if eviction is Eviction.WORTH:
        return {"eviction_policy": "WorthPolicy", "cache_policy_module_path": f"{_TIERS}.worth_policy"}
    return {"eviction_policy": str(eviction)}


def _disk(settings: WorkerSettings) -> dict[str, Any] | None:
    if not settings.disk_kv_dir:
        return None
    options = DiskOptions(
        directory=settings.disk_kv_dir,
        capacity_bytes=settings.disk_kv_bytes,
        free_bytes=settings.disk_kv_free_bytes,
        shared=settings.disk_kv_shared,
        deadline_s=settings.disk_kv_deadline_s,
        setup=f"{settings.device} {settings.dtype} {settings.kv_cache_dtype} {settings.engine_args}",
        adapters=adapters(split(settings.engine_args)),
    )
    return {
        "type": "DiskTier",
        "module_path": f"{_TIERS}.disk_tier",
        **msgspec.structs.asdict(options),
    }
