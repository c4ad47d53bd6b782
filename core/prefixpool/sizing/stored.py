"""Safetensors files: which of a model's files hold its weights, and how many bytes their headers speak of.

A file begins with the length of its header (8 bytes, little endian), then the header: JSON, tensor by tensor.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any, Final

import msgspec

from prefixpool.sizing.errors import ShapeError

CONFIG: Final = "config.json"
INDEX: Final = "model.safetensors.index.json"
LENGTH_BYTES: Final = 8
HEADER_MOST: Final = 100 << 20  # bytes; the limit of the format


def weight_files(names: Collection[str], index: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Those that the index names, or else `model*.safetensors`. Empty if one is missing: a part says little of the whole.
    ShapeError if the index is none."""
    if index is None:
        return tuple(sorted(name for name in names if fnmatch(name, "model*.safetensors")))
    wanted = index.get("weight_map")
    named = list(wanted.values()) if isinstance(wanted, Mapping) else []
    if not all(isinstance(name, str) for name in named):
        raise ShapeError(f"`weight_map` in {INDEX} names files that are no text")
    found = tuple(sorted(set(named)))
    return found if all(name in names for name in found) else ()


def header_length(start: bytes, name: str) -> int:
    """From a file's first bytes. ShapeError if it is none."""
    size = struct.unpack("<Q", start)[0] if len(start) == LENGTH_BYTES else HEADER_MOST + 1
    if size > HEADER_MOST:
        raise ShapeError(f"{name} is not a safetensors file")
    return int(size)


def decoded(text: bytes, name: str) -> dict[str, Any]:
    """A header, an index, or a config. ShapeError names the file."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ShapeError(f"{name} cannot be read: {error}") from error


def tensor_bytes(headers: Sequence[Mapping[str, Any]]) -> int:
    """Bytes of all tensors in decoded headers."""
    try:
        return sum(
            int(tensor["data_offsets"][1]) - int(tensor["data_offsets"][0])
            for header in headers
            for name, tensor in header.items()
            if name != "__metadata__"
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ShapeError(f"a safetensors header has a tensor without offsets: {error!r}") from error
