"""A model's own folder: config.json, and the headers of its weights if they are all there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefixpool.sizing import stored
from prefixpool.sizing.errors import ShapeError


def config_of(folder: Path) -> dict[str, Any]:
    """ShapeError if there is none that can be read."""
    return _decoded(folder / stored.CONFIG)


def weight_bytes_of(folder: Path) -> int:
    """As the headers say; 0 if files are missing (a folder without weights is fine). ShapeError names a broken file."""
    index = folder / stored.INDEX
    try:
        names = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise ShapeError(f"{folder} cannot be listed: {error.strerror}") from error
    files = stored.weight_files(names, _decoded(index) if index.is_file() else None)
    return stored.tensor_bytes([_header(folder / name) for name in files])


def _decoded(path: Path) -> dict[str, Any]:
    try:
        return stored.decoded(path.read_bytes(), path.name)
    except FileNotFoundError as error:
        raise ShapeError(f"{path.parent} has no {path.name}; is it the model's own folder?") from error
    except OSError as error:
        raise ShapeError(f"{path} cannot be read: {error.strerror}") from error


def _header(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            length = stored.header_length(stream.read(stored.LENGTH_BYTES), path.name)
            return stored.decoded(stream.read(length), f"the header of {path.name}")
    except OSError as error:
        raise ShapeError(f"{path} cannot be read: {error.strerror}") from error
