"""One sentence for a plan, with the numbers that decide."""

from __future__ import annotations

import msgspec

from prefixpool.sizing.memory import GIB, DeviceMemory
from prefixpool.sizing.request import Budget, SizingRequest
from prefixpool.sizing.tiers import TierSize


def gib(size: int) -> str:
    """For people; small sizes in MiB."""
    return f"{size / GIB:,.1f} GiB" if abs(size) >= GIB // 2 else f"{size / (1 << 20):,.0f} MiB"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan came to."""

    short: int  # bytes; 0: it fits
    held: TierSize  # what one replica keeps in the tier that counts
    on_host: bool  # which tier that is
    replicas: int
    sessions: int  # that one replica keeps


def sentence(request: SizingRequest, divided: DeviceMemory, outcome: Outcome) -> str:
    """Why it does not fit, or why so many replicas."""
    if outcome.short:
        return _too_small(request, divided, outcome.short)
    if request.budget is None:
        return f"One replica holds {outcome.held.tokens:,} tokens of KV on its {_devices(request)}."
    return _budget(request, request.budget, outcome)


def _too_small(request: SizingRequest, divided: DeviceMemory, short: int) -> str:
    usable = f"{gib(divided.usable)} that may be used of {request.accelerator.name}'s {gib(divided.total)}"
    if divided.weights > divided.usable:
        return (
            f"Weights take {gib(divided.weights)} on each device, more than the {usable}; with the engine's overhead and "
            f"one sequence of {request.length:,} tokens, {gib(short)} are missing."
        )
    if divided.room <= 0:
        return (
            f"Weights ({gib(divided.weights)}) and the engine's overhead ({gib(divided.overhead)}) leave nothing for KV of "
            f"the {usable}; with one sequence of {request.length:,} tokens, {gib(short)} are missing."
        )
    if request.kv_bytes > divided.room and short == request.kv_bytes - divided.room:
        return f"{gib(request.kv_bytes)} of KV are asked for, and {_left(divided)}: {gib(short)} are missing."
    given = f"{gib(request.kv_bytes)} are given to KV" if request.kv_bytes else _left(divided)
    return (
        f"KV of one sequence of {request.length:,} tokens takes {gib((request.kv_bytes or divided.room) + short)} on each "
        f"device, and {given}: {gib(short)} are missing."
    )


def _left(divided: DeviceMemory) -> str:
    return f"{gib(divided.room)} are left beside weights and overhead"


def _budget(request: SizingRequest, budget: Budget, outcome: Outcome) -> str:
    where = "in host memory" if outcome.on_host else f"on its {_devices(request)}"
    need = "1 replica is needed" if outcome.replicas == 1 else f"{outcome.replicas:,} replicas are needed"
    if budget.sessions:
        return (
            f"One replica keeps {outcome.sessions:,} sessions of {budget.tokens_per_session:,} tokens warm {where}; "
            f"for {budget.sessions:,} sessions {need}."
        )
    return f"One replica keeps {outcome.held.tokens:,} tokens warm {where}; for {budget.resident_tokens:,} tokens {need}."


def _devices(request: SizingRequest) -> str:
    number = request.parallel.devices
    return f"{request.accelerator.name} device" if number == 1 else f"{number} {request.accelerator.name} devices"
