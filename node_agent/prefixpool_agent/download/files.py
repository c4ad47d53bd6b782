"""Which files of a repository an engine needs, and how many of their bytes are there. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import Any, Final

import msgspec

from prefixpool.errors import PrefixpoolError
from prefixpool.sizing import stored

_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.pth")  # the first that a repository has
_OTHER_FORMATS: Final = (
    *("*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.ot", "*.tflite", "*.mlmodel", "*.ckpt", "*.npz"),
    *("onnx/*", "original/*", "metal/*", "openvino/*", "coreml/*"),
    *(".gitattributes", "*.md", "*.png", "*.jpg", "*.jpeg", "*.gif", "*.svg", "*.pdf", "*.mp4"),
)


class DownloadError(PrefixpoolError):
    """Why it does not go on, in words for the pool's owner; it may later."""


class File(msgspec.Struct, frozen=True):
    """`blob`: its name in the cache, which is a digest of its content."""

    name: str
    size_bytes: int
    blob: str


class Listing(msgspec.Struct, frozen=True):
    """What is needed of one commit of a repository; weights last."""

    commit: str
    files: tuple[File, ...]

    @property
    def total_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def needed(listing: Listing, index: Mapping[str, Any] | None) -> Listing:
    """Without other formats of the same weights. `index`: the repository's own, if it has one. Without any weights: none."""
    by_name = {file.name: file for file in listing.files}
    weights = [by_name[name] for name in _weights(tuple(by_name), index)]
    rest = [file for file in listing.files if not _is_any(file.name, (*_WEIGHTS, *_OTHER_FORMATS))]
    return Listing(listing.commit, (*rest, *sorted(weights, key=lambda file: -file.size_bytes)) if weights else ())


def _weights(names: tuple[str, ...], index: Mapping[str, Any] | None) -> tuple[str, ...]:
    if indexed := stored.weight_files(names, index):
        return indexed
    top = [name for name in names if len(PurePosixPath(name).parts) == 1]
    return next((tuple(found) for kind in _WEIGHTS if (found := [name for name in top if fnmatch(name, kind)])), ())


def _is_any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def done_bytes(listing: Listing, on_disk: Mapping[str, int]) -> int:
    """`on_disk`: bytes by blob, whole or not; more than there should be counts as whole."""
    return sum(min(file.size_bytes, on_disk.get(file.blob, 0)) for file in listing.files)
