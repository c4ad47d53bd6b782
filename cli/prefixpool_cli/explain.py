"""`prefixpool explain`: why a request went where it went, in numbers and in words."""

from __future__ import annotations

from datetime import datetime
from typing import Final

import aiohttp
import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table

from prefixpool.policy.base import Reason
from prefixpool_cli.admin import AdminClient
from prefixpool_cli.console import shown
from prefixpool_cli.errors import CliError
from prefixpool_router.explain import Ending, Explanation, Tiers

SEARCHED = 1000

WORDS: Final = {
    Reason.WARM: "it holds part of the prompt, and all costs together were least there",
    Reason.COLD: "nobody held anything of the prompt; this is the prefix's place on the ring",
    Reason.COLD_MOVED: "nobody held anything of the prompt, and the ring's place was too busy",
    Reason.OVERFLOW: "the holder was too busy, so that computing the prompt again elsewhere was cheaper",
    Reason.LEAST_LOAD: "it had the least to do",
    Reason.ROUND_ROBIN: "it was its turn",
    Reason.RANDOM: "drawn by chance",
    Reason.SESSION: "the client's session belongs there",
    Reason.FRESH: "it is new or lost its cache, and gets a share of the requests so that it fills",
    Reason.ONLY: "no other replica could take it",
    Reason.NO_CHAIN: "requests of this kind have no prefix; it had the least to do",
}


async def explain(admin: str, request_id: str, last: int, console: Console, *, as_json: bool) -> bool:
    """Raises CliError if the router does not answer or knows no such request."""
    async with aiohttp.ClientSession() as http:
        client = AdminClient(http, admin)
        found = await client.explain(SEARCHED if request_id else max(1, last), request_id)
    if not found:
        raise CliError(*_nothing(request_id))
    if as_json:
        console.print_json(msgspec.json.encode(found).decode())
    elif last and not request_id:
        console.print(summary(found))
    else:
        for attempt in reversed(found):  # a request that was tried twice: in the order of its attempts
            console.print(details(attempt))
    return True


def _nothing(request_id: str) -> tuple[str, str]:
    if request_id:
        return f"no decision about request {request_id} is remembered", "routers keep the last 512 (`--explain-last`)"
    return "the router has decided nothing yet", "send a request first"


def summary(found: list[Explanation]) -> Table:
    """A line for each decision, newest first."""
    table = Table()
    for column in ("at", "request", "replica", "reason"):
        table.add_column(column)
    for column in ("prompt", "predicted", "actual", "status", "seconds"):
        table.add_column(column, justify="right")
    for one in found:
        table.add_row(
            _clock(one.at),
            shown(one.request_id),
            shown(one.replica),
            shown(one.reason),
            str(_prompt_tokens(one)),
            str(one.predicted_tokens),
            _count(one.outcome.cached_tokens if one.outcome else None),
            shown(_status(one.outcome)),
            f"{one.outcome.seconds:.3f}" if one.outcome else "",
        )
    return table


def details(one: Explanation) -> RenderableType:
    """Everything about one decision."""
    table = Table(title=f"{shown(one.policy)}: what every replica would have cost", title_justify="left")
    table.add_column("replica")
    for column in ("cached there", "in any tier", "in flight", "queue", "prefill", "total", "trust", ""):
        table.add_column(column, justify="right")
    for each in sorted(one.candidates, key=lambda c: (c.name != one.replica, c.total)):
        table.add_row(
            f"[bold]{shown(each.name)}[/] ◀" if each.name == one.replica else shown(each.name),
            str(each.device_tokens),
            str(each.held_tokens),
            str(each.inflight),
            f"{each.queue_s * 1000:.0f} ms",
            f"{each.prefill_s * 1000:.0f} ms",
            f"{each.total * 1000:.0f} ms",
            f"{each.trust:.2f}",
            "above its bound" if each.gated else "",
        )
    return Group("\n".join(_head(one)), table, shown(_ending(one)))


def _head(one: Explanation) -> list[str]:
    reason = WORDS.get(Reason(one.reason), "") if one.reason in list(Reason) else ""
    lines = [
        f"[bold]{shown(one.request_id or one.id)}[/]  {shown(f'{one.path}  {one.model}')}  {_clock(one.at)}",
        f"went to [bold]{shown(one.replica)}[/] ({shown(one.reason)}): {reason}",
    ]
    if one.tiers.held_tokens > one.tiers.device_tokens:
        lines.append(shown(_tiers(one.tiers)))
    if one.excluded:
        lines.append(shown(f"tried before and given up: {', '.join(one.excluded)}"))
    return lines


def _tiers(tiers: Tiers) -> str:
    found = f"{tiers.device_tokens} on the device, {tiers.host_tokens} in host memory, {tiers.disk_tokens} on disk"
    prices = f"loading takes {tiers.load_s * 1000:.1f} ms, computing all but the device's {tiers.recompute_s * 1000:.1f} ms"
    return f"of {tiers.held_tokens} tokens held there it uses {found}; {prices}" + (
        f"; told {tiers.told}" if tiers.told else ""
    )


def _ending(one: Explanation) -> str:
    predicted = f"predicted {one.predicted_tokens} of about {_prompt_tokens(one)} tokens cached (knowledge: {one.mode})"
    end = one.outcome
    if end is None:
        return f"{predicted}; still running\n"
    if end.abandoned:
        return f"{predicted}; given up after {end.seconds:.3f} s, nothing reached the client: {end.abandoned}\n"
    if end.cached_tokens is None:
        return f"{predicted}; the engine did not say what it found\n{_result(end)}\n"
    return f"{predicted}; actual {end.cached_tokens} ({_error(one, end.cached_tokens)})\n{_result(end)}\n"


def _error(one: Explanation, actual: int) -> str:
    off = one.predicted_tokens - actual
    blocks = f", {abs(off) / one.block_tokens:.1f} blocks" if one.block_tokens else ""
    return "exact" if not off else f"{'over' if off > 0 else 'under'} by {abs(off)} tokens{blocks}"


def _result(end: Ending) -> str:
    what = end.error or ("the client went away" if end.aborted else "answered")
    return f"{what}: status {end.status}, {_count(end.output_tokens)} tokens out, {end.seconds:.3f} s"


def _prompt_tokens(one: Explanation) -> int:
    """What the engine counted, else the router's estimate."""
    known = one.outcome.prompt_tokens if one.outcome else None
    return one.prompt_tokens if known is None else known


def _status(end: Ending | None) -> str:
    if end is None:
        return "running"
    return end.abandoned or str(end.status)


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _clock(at_s: float) -> str:
    return datetime.fromtimestamp(at_s).astimezone().strftime("%H:%M:%S.%f")[:-3]
