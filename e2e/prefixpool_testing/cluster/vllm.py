"""Real vLLM on CPUs in a cluster. The worker's image stays as it is, without vLLM: the 6 GB of .venv-engine, and the model,
are folders of this machine in the volume that a pool mounts for its model, and PYTHONPATH names them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from prefixpool.api.model import MODELS
from prefixpool_testing.cluster import debian, wheels
from prefixpool_testing.cluster.errors import ClusterError
from prefixpool_testing.cluster.node import Node

BLOCK: Final = 32
_CLAIM: Final = "models"
_VOLUME: Final = "vllm-on-cpus"
_HINT: Final = "use `make e2e-vllm`"


@contextmanager
def volume(cluster: Node) -> Iterator[str]:
    """A PersistentVolume with everything; its name."""
    folder = cluster.volume(_VOLUME, {"model": _model(), "python": _packages(), "lib": _libraries()})
    cluster.api.apply(_persistent_volume(folder))
    try:
        yield _VOLUME
    finally:
        cluster.api.kubectl("delete", "pv", _VOLUME, "--timeout=60s")


def claim(namespace: str, of: str) -> dict[str, Any]:
    """The claim that `spec` names."""
    spec = {
        "accessModes": ["ReadOnlyMany"],
        "storageClassName": "",
        "volumeName": of,
        "resources": {"requests": {"storage": "1Gi"}},
    }
    meta = {"name": _CLAIM, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": spec}


def spec(served: str) -> dict[str, Any]:
    """Fields of a pool of such engines. Without a compiler in the image, nothing can be compiled (level 0)."""
    libraries = f"{MODELS}/lib:{MODELS}/python/torch/lib"
    return {
        "model": {"source": f"{MODELS}/model", "servedName": served, "volume": {"claimName": _CLAIM}},
        "engine": {
            "kind": "vllm",
            "maxModelLen": 2048,
            "blockSize": BLOCK,
            "extraArgs": ["--optimization-level=0"],
            "env": [
                {"name": "PYTHONPATH", "value": f"{MODELS}/python"},
                {"name": "LD_LIBRARY_PATH", "value": libraries},
            ],
        },
        "accelerator": {"resource": "cpu", "memory": "4Gi"},
    }


def _persistent_volume(folder: Path) -> dict[str, Any]:
    spec = {
        "capacity": {"storage": "1Gi"},  # nobody measures
        "accessModes": ["ReadOnlyMany"],
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": "",
        "hostPath": {"path": str(folder)},
    }
    return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": _VOLUME}, "spec": spec}


def _model() -> Path:
    """Readable for the user of the pods, which the library that wrote the weights did not think of."""
    model = Path(os.environ.get("MODEL", ""))
    if not (model / "config.json").is_file():
        raise ClusterError(f"MODEL={model} is not the folder of a model: {_HINT}")
    for file in model.iterdir():
        file.chmod(0o644)
    return model.resolve()


def _packages() -> Path:
    found = wheels.ROOT / f".venv-engine/lib/python{wheels.PYTHON}/site-packages"
    if not (found / "vllm").is_dir():
        raise ClusterError(f"{found} has no vLLM for the image's Python {wheels.PYTHON}: {_HINT}")
    return found


def _libraries() -> Path:
    """What vLLM's extension links to and the image lacks."""
    return debian.unpacked("libnuma1") / "usr/lib/x86_64-linux-gnu"
