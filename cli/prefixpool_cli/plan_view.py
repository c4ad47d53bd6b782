"""How a sizing plan looks on a terminal: a line about the model, a bar for each device, figures side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from prefixpool.sizing.reasons import gib
from prefixpool.sizing.request import SizingRequest
from prefixpool.sizing.speed import BreakEven
from prefixpool.sizing.tiers import TierSize

if TYPE_CHECKING:
    from prefixpool_cli.plan import Planned

BAR_WIDTH: Final = 50
_PARTS: Final = (("weights", "█", "blue"), ("overhead", "▓", "yellow"), ("KV", "▒", "green"), ("left", "·", "dim"))


def view(requests: Sequence[SizingRequest], found: Sequence[Planned]) -> Iterator[RenderableType]:
    """All that is printed, from top to bottom."""
    yield _model(requests[0], found[0])
    yield _legend()
    for one in found:
        yield _bar(one)
    yield _figures(requests, found)
    for one in found:
        yield _reason(one)


def _model(request: SizingRequest, first: Planned) -> Text:
    shape = request.shape
    counts = shape.parameters
    active = f" ({counts.active / 1e9:,.2f} B active)" if counts.experts else ""
    return Text.assemble(
        (shape.name, "bold"),
        f"  {counts.total / 1e9:,.2f} B parameters{active}, weights {gib(shape.weight_bytes)}, {shape.attention}, "
        f"KV {first.plan.kv_bytes_per_token:,} bytes per token\n",
    )


def _legend() -> Text:
    return Text.assemble("One device:  ", *((f"{sign} {name}  ", style) for name, sign, style in _PARTS))


def _bar(one: Planned) -> Text:
    memory = one.plan.memory
    kv = one.plan.device_per_replica.bytes // one.devices
    sizes = (memory.weights, memory.overhead, kv, max(0, memory.total - memory.weights - memory.overhead - kv))
    text = Text(f"{_label(one):>20}  ")
    for width, (_, sign, style) in zip(bar_widths(sizes), _PARTS, strict=True):
        text.append(sign * width, style)
    text.append(f"  {gib(memory.weights)} + {gib(memory.overhead)} + {gib(kv)} of {gib(memory.total)}")
    return text


def bar_widths(sizes: Sequence[int], width: int = BAR_WIDTH) -> list[int]:
    """Columns of each part; together exactly `width`. Cut where parts exceed the whole (weights that do not fit)."""
    total = max(1, sum(sizes))
    ends = [round(sum(sizes[: index + 1]) * width / total) for index in range(len(sizes))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _figures(requests: Sequence[SizingRequest], found: Sequence[Planned]) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), title=None, header_style="bold")
    table.add_column("")
    for one in found:
        table.add_column(_label(one), justify="right")
    for name, *values in zip(*(_column(request, one) for request, one in zip(requests, found, strict=True)), strict=True):
        table.add_row(name[0], *(value for _, value in (name, *values)))
    return table


def _column(request: SizingRequest, one: Planned) -> list[tuple[str, str]]:
    plan = one.plan
    rows = [
        ("device tier, per replica", _tier(plan.device_per_replica)),
        ("host tier, per replica", _tier(plan.host_per_replica)),
        ("disk tier, per replica", _tier(plan.disk_per_replica)),
        (f"sequences of {plan.max_model_len:,} at once", f"{plan.concurrent_sequences:,.2f}"),
    ]
    budget = request.budget
    if budget and budget.sessions:
        rows.append((f"sessions of {budget.tokens_per_session:,} kept warm", f"{plan.sessions_per_replica:,}"))
    rows += [
        ("replicas", f"{plan.replicas:,}" if plan.fits else "does not fit"),
        ("devices in all", f"{plan.replicas * one.devices:,}" if plan.fits else "-"),
        (f"decoding at {one.decode_tokens:,}, at most", _speed(one.decode_tokens_per_second)),
    ]
    known = {each.tier: _break_even(each) for each in one.break_even}
    rows += [(f"loading from {tier} pays from", known.get(tier, "-")) for tier in ("host", "disk")]
    return [*rows, ("container memory, of it shared", _needs(one))]


def _speed(tokens_per_second: float | None) -> str:
    return "-" if tokens_per_second is None else f"{tokens_per_second:,.0f} tokens/s"


def _needs(one: Planned) -> str:
    needs = one.plan.host_needs
    return f"{gib(needs.memory)}, {gib(needs.shared_memory)}"


def _break_even(each: BreakEven) -> str:
    return "never" if each.tokens is None else f"{each.tokens:,} tokens"


def _tier(tier: TierSize) -> str:
    return f"{tier.tokens:,} tokens ({gib(tier.bytes)})" if tier.bytes else "-"


def _reason(one: Planned) -> Text:
    plan = one.plan
    text = Text.assemble((f"\n{_label(one)}: ", "bold"), (plan.reason, "" if plan.fits else "red"))
    if plan.changes:
        text.append("\n  Any of these alone would fit: " + "; ".join(plan.changes) + ".")
    elif not plan.fits:
        text.append("\n  No single change to these settings would make it fit.")
    for warning in plan.warnings:
        text.append(f"\n  Warning: {warning.message}", "yellow")
    return text


def _label(one: Planned) -> str:
    return one.accelerator if one.devices == 1 else f"{one.devices} × {one.accelerator}"
