"""`prefixpool plan`: what a model's KV cache takes on which accelerators, and how many replicas a budget needs.

Reads a model by its catalogue name, its folder, or its config.json; asks `prefixpool.sizing`; prints it as figures or JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from prefixpool.api.quantity import Bytes
from prefixpool.sizing import catalogue, shape, speed
from prefixpool.sizing.catalogue import Accelerator
from prefixpool.sizing.inspection import Inspection
from prefixpool.sizing.kv import CPU_BLOCK_TOKENS, DEFAULT_BLOCK_TOKENS
from prefixpool.sizing.plan import SizingPlan, SizingRequest
from prefixpool.sizing.plan import plan as make_plan
from prefixpool.sizing.shape import ModelShape
from prefixpool.sizing.stored import decoded
from prefixpool_agent.inspection import folder
from prefixpool_cli import plan_view
from prefixpool_cli.errors import CliError
from prefixpool_cli.preflight import expanded


class Planned(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """All that is known about one model on one accelerator."""

    model: str
    accelerator: str
    devices: int
    plan: SizingPlan
    decode_tokens: int  # length for which the bound holds
    decode_tokens_per_second: float | None = None  # None: nothing is known of the device's speed
    break_even: tuple[speed.BreakEven, ...] = ()


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
    known = Planned(
        model=request.shape.name,
        accelerator=request.accelerator.name,
        devices=request.parallel.devices,
        plan=make_plan(request),
        decode_tokens=tokens,
    )
    if not request.accelerator.bandwidth:
        return known
    return msgspec.structs.replace(
        known,
        decode_tokens_per_second=round(speed.decode_tokens_per_s(*parts, request.kv_dtype, tokens), 1),
        break_even=speed.break_even(*parts, request.kv_dtype),
    )


def find_device(named: str) -> Accelerator:
    """From the catalogue, or `cpu:16Gi`: CPUs, and the memory of a replica on them. Raises CliError or SizingError."""
    name, _, memory = named.partition(":")
    if name != "cpu":
        return catalogue.accelerator(named)
    try:
        return catalogue.cpu(int(Bytes.parse(memory)))
    except ValueError as error:
        raise CliError(f"{named}: {error}", "on CPUs, say how much memory a replica may take: cpu:16Gi") from error


def block_tokens(device: Accelerator, wanted: int) -> int:
    """As wanted, or as our worker asks for on this device."""
    return wanted or (CPU_BLOCK_TOKENS if device.host_memory else DEFAULT_BLOCK_TOKENS)


def find_model(named: str) -> ModelShape:
    """From a folder, a config.json, or the catalogue. Raises CliError or SizingError that says what there is."""
    path = expanded(named)
    if path.is_dir():
        return _from_folder(path)
    if path.is_file():
        return shape.parse(decoded(path.read_bytes(), str(path)), path.resolve().parent.name)
    if path.suffix == ".json" or named.startswith((".", "/", "~")):
        raise CliError(f"{named} is not there", "a catalogue name, a model's folder, or its config.json is needed")
    return catalogue.model(named)


def _from_folder(path: Path) -> ModelShape:
    found = Inspection(config=folder.config_of(path), weight_bytes=folder.weight_bytes_of(path))
    return found.shape(path.resolve().name)
