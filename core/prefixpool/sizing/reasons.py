"""One sentence for a plan, with the numbers that decide."""

from __future__ import annotations

from prefixpool.sizing.memory import GIB, DeviceMemory
from prefixpool.sizing.request import SizingRequest
from prefixpool.sizing.tiers import TierSize


def gib(size: int) -> str:
    """For people; small sizes in MiB."""
    return f"{size / GIB:,.1f} GiB" if abs(size) >= GIB // 2 else f"{size / (1 << 20):,.0f} MiB"


def sentence(request: SizingRequest, divided: DeviceMemory, short: int, held: TierSize, replicas: int, sessions: int) -> str:
    """Why it does not fit, or why so many replicas."""
    if short:
        return _too_small(request, divided, short)
    if request.budget is None:
        return f"One replica holds {held.tokens:,} tokens of KV on its {_devices(request)}."
    return _budget(request, held, replicas, sessions)


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
    return (
        f"KV of one sequence of {request.length:,} tokens takes {gib(divided.room + short)} on each device, and "
        f"{gib(divided.room)} are left beside weights and overhead: {gib(short)} are missing."
    )


def _budget(request: SizingRequest, held: TierSize, replicas: int, sessions: int) -> str:
    budget = request.budget
    assert budget is not None
    where = "host memory" if budget.tier.value == "host" else _devices(request)
    need = f"{replicas} {'replica is' if replicas == 1 else 'replicas are'} needed"
    if budget.sessions:
        return (
            f"One replica keeps {sessions:,} sessions of {budget.tokens_per_session:,} tokens warm on its {where}; "
            f"for {budget.sessions:,} sessions {need}."
        )
    return f"One replica keeps {held.tokens:,} tokens warm on its {where}; for {budget.resident_tokens:,} tokens {need}."


def _devices(request: SizingRequest) -> str:
    number = request.parallel.devices
    return f"{request.accelerator.name} device" if number == 1 else f"{number} {request.accelerator.name} devices"
