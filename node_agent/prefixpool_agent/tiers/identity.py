"""Whose chunks these are: same weights, same way of computing. Chunks of another identity are never read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from prefixpool_agent.tiers.chunk_file import NAMESPACE_BYTES

_CONFIGS: Final = ("config.json", "adapter_config.json")
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".gguf")
_SAMPLE_BYTES: Final = 65_536
_SAMPLES: Final = 64


def namespace(model: str, setup: Mapping[str, Any], adapters: Iterable[str] = ()) -> bytes:
    """`setup`: whatever changes the bytes of a chunk. A model's folder counts by what is in it, not by where it is.

    So do folders of adapters: the engine's keys of chunks have their names and paths, which a newer one may have, too.
    Raises OSError.
    """
    folder = Path(model)
    what = model_digest(folder) if folder.is_dir() else model
    folders = {path: Path(path).expanduser() for path in adapters}
    found = {path: model_digest(folder) for path, folder in folders.items() if folder.is_dir()}
    words = json.dumps({"model": what, **({"adapters": found} if found else {}), **setup}, sort_keys=True, default=str)
    return hashlib.blake2b(words.encode(), digest_size=NAMESPACE_BYTES).digest()


def model_digest(folder: Path) -> str:
    """Of the configuration, and of samples all over the weights: reading all would take as long as loading the model."""
    digest = hashlib.blake2b(digest_size=NAMESPACE_BYTES)
    for config in (folder / name for name in _CONFIGS):
        if config.is_file():
            digest.update(config.read_bytes())
    for path in sorted(path for path in folder.iterdir() if path.suffix in _WEIGHTS):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for i in range(_SAMPLES):
                file.seek(i * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
