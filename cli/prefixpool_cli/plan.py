"""`prefixpool plan`: what a model's KV cache takes on which accelerators, and how many replicas a budget needs.

Reads a model by its catalogue name, its folder, or its config.json; asks `prefixpool.sizing`; prints it as figures or JSON.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console

from prefixpool.sizing import catalogue, shape, speed
from prefixpool.sizing.errors import ShapeError
from prefixpool.sizing.plan import SizingPlan, SizingRequest
from prefixpool.sizing.plan import plan as make_plan
from prefixpool.sizing.shape import ModelShape
from prefixpool_cli import plan_view
from prefixpool_cli.errors import CliError

_HEADER_MOST: Final = 100 << 20  # bytes; the limit of the safetensors format


class Planned(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """All that is known about one model on one accelerator."""

    model: str
    accelerator: str
    devices: int
    plan: SizingPlan
    decode_tokens: int  # length for which the bound holds
    decode_tokens_per_second: float
    break_even: tuple[speed.BreakEven, ...]


def plan(requests: Sequence[SizingRequest], console: Console, *, as_json: bool) -> bool:
    """Prints a plan for each request. False if none fits. Raises SizingError for requests that contradict themselves."""
    found = [planned(request) for request in requests]
    if as_json:
        console.print_json(msgspec.json.encode(found).decode())
    else:
        for part in plan_view.view(requests, found):
            console.print(part, highlight=False)
    return any(one.plan.fits for one in found)


def planned(request: SizingRequest) -> Planned:
    """The plan, and the bounds on speed that go with it."""
    budget = request.budget
    tokens = (budget.tokens_per_session if budget else 0) or min(request.length, 8192)
    parts = (request.shape, request.accelerator, request.parallel)
    return Planned(
        model=request.shape.name,
        accelerator=request.accelerator.name,
        devices=request.parallel.devices,
        plan=make_plan(request),
        decode_tokens=tokens,
        decode_tokens_per_second=round(speed.decode_tokens_per_s(*parts, request.kv_dtype, tokens), 1),
        break_even=speed.break_even(*parts, request.kv_dtype),
    )


def find_model(named: str) -> ModelShape:
    """From a folder, a config.json, or the catalogue. Raises CliError or SizingError that says what there is."""
    path = Path(named).expanduser()
    if path.is_dir():
        return _from_folder(path)
    if path.is_file():
        return shape.parse(_config(path), path.resolve().parent.name)
    if path.suffix == ".json" or named.startswith((".", "/", "~")):
        raise CliError(f"{named} is not there", "a catalogue name, a model's folder, or its config.json is needed")
    return catalogue.model(named)


def _from_folder(folder: Path) -> ModelShape:
    config = folder / "config.json"
    if not config.is_file():
        raise CliError(f"{folder} has no config.json", "is it the model's own folder?")
    found = shape.parse(_config(config), folder.resolve().name)
    stored = _stored_bytes(folder)
    return shape.with_stored_bytes(found, stored) if stored else found


def _config(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, OSError) as error:
        raise CliError(f"{path} cannot be read as a config.json: {error}") from error


def _stored_bytes(folder: Path) -> int:
    """Bytes of all weights as the files' headers say; 0 if files are missing (a folder without weights is fine)."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(_config(index).get("weight_map", {}).values()))
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("model*.safetensors"))
    if not files or not all(file.is_file() for file in files):
        return 0
    return shape.header_bytes([_header(file) for file in files])


def _header(file: Path) -> Mapping[str, Any]:
    with file.open("rb") as stream:
        start = stream.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else _HEADER_MOST + 1
        if size > _HEADER_MOST:
            raise ShapeError(f"{file.name} is not a safetensors file")
        try:
            return msgspec.json.decode(stream.read(size), type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ShapeError(f"the header of {file.name} cannot be read: {error}") from error
