"""The report of the tiers: that of the demo with tiers and a restart in it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

import msgspec
from rich.table import Table

from prefixpool.api.engine import EngineKind
from prefixpool_cli.demo import page
from prefixpool_cli.demo import report as reports
from prefixpool_cli.demo.figures import ArmFigures, PredictionFigures
from prefixpool_cli.demo.greedy import GreedyFigures
from prefixpool_cli.demo.report import ArmTokens, Goal, Report, Setup, goal
from prefixpool_cli.demo.samples import Arm
from prefixpool_cli.demo.spill.figures import Repeat, RestartFigures, TierTokens
from prefixpool_cli.demo.spill.plan import PRESSURE, Sizes
from prefixpool_cli.demo.spill.ttft import TierTimes, ttft_goals

WORKING_SET: Final = (PRESSURE - 0.5, PRESSURE + 0.5)
HIT_OF_IDEAL: Final = 0.9
FAR_BELOW: Final = 0.6  # of ideal: what the device alone must stay under, or there was nothing to show
COLUMNS: Final = (
    "requests", "errors", "hit rate", "ideal", "of ideal", "device", "host", "disk",
    "TTFT p50", "TTFT p95", "requests/s", "within 1 block", "over",
)  # fmt: skip

TTFT_TITLE: Final = "Time to first token by where the prefix is"
TTFT_HOW: Final = (
    "Medians, through the router, with nothing else in flight; the model in its own number type, as users run it; files on "
    "disk are in the page cache, as what was written lately is."
)
TTFT_COLUMNS: Final = ("prompt tokens", "cold", "device hit", "host restore", "disk restore")


class SpillReport(Report, frozen=True, kw_only=True):
    """`build/demo/spill.json`. Keys are promised; new ones may come. `replicas`: of an arm that has no number of its own."""

    host_bytes: int  # of each replica that has a host tier
    disk_bytes: int
    replicas_by_arm: dict[str, int]
    tiers: dict[str, TierTokens]
    restart: RestartFigures | None
    ttft: dict[str, TierTimes]  # by tokens of the prompt


class Passed(msgspec.Struct, frozen=True, kw_only=True):
    """An arm that has run."""

    requests: ArmTokens
    replicas: int
    tiers: TierTokens
    restart: RestartFigures | None = None
    repeats: Arm | None = None  # what was sent beside the workload

    def answers(self) -> list[Arm]:
        """All that an engine said."""
        return [self.requests.arm, *([self.repeats] if self.repeats else [])]


def build(
    setup: Setup, sizes: Sizes, passed: Sequence[Passed], ttft: Mapping[str, TierTimes], greedy: GreedyFigures | None
) -> SpillReport:
    """In the order of the arms."""
    found = reports.build(setup, [each.requests for each in passed], greedy)
    restart = next((each.restart for each in passed if each.restart is not None), None)
    names = [each.requests.arm.name for each in passed]
    return SpillReport(
        **msgspec.structs.asdict(msgspec.structs.replace(found, goals=goals(found, restart, ttft))),
        host_bytes=sizes.host_bytes,
        disk_bytes=sizes.disk_bytes,
        replicas_by_arm={name: each.replicas for name, each in zip(names, passed, strict=True)},
        tiers={name: each.tiers for name, each in zip(names, passed, strict=True)},
        restart=restart,
        ttft=dict(ttft),
    )


def of_ideal(arm: ArmFigures) -> float:
    """Hit rate as a fraction of what a cache that never forgets would have had."""
    return arm.hit_rate / arm.ideal_hit_rate if arm.ideal_hit_rate else 0.0


def goals(found: Report, restart: RestartFigures | None, ttft: Mapping[str, TierTimes]) -> tuple[Goal, ...]:
    """Only goals whose arms ran."""
    errors, ratio, (low, high) = found.errors(), found.working_set_ratio, WORKING_SET
    seen = [
        goal("every request answered", f"{errors} errors", errors == 0),
        goal(f"working set {low:g} to {high:g} times one replica's device cache", f"{ratio:.2f}", low <= ratio <= high),
        *_hit_goals(found.arms),
        *ttft_goals(ttft),
        *_restart_goals(restart),
    ]
    if found.engine != EngineKind.SIM:  # its time runs so fast that agents cannot look as often as it needs
        seen += [*_expected_goals(restart, found.block_tokens), *reports.prediction_goals(found.prediction)]
    if found.greedy is not None:
        seen.append(reports.greedy_goal(found.greedy))
    return tuple(seen)


def _hit_goals(arms: Mapping[str, ArmFigures]) -> list[Goal]:
    alone, host = arms.get("device"), arms.get("host")
    seen = []
    if alone is not None:
        seen.append(goal(f"device alone: below {FAR_BELOW} of ideal", f"{of_ideal(alone):.3f}", of_ideal(alone) < FAR_BELOW))
    if alone is not None and host is not None:
        words = f"{host.hit_rate:.3f}, device alone {alone.hit_rate:.3f}"
        seen.append(goal("host memory: more is reused", words, host.hit_rate > alone.hit_rate))
    for name in ("host_disk", "shared_restart"):
        if name in arms:
            reached = of_ideal(arms[name])
            seen.append(
                goal(f"{name}: hit rate at least {HIT_OF_IDEAL} of ideal", f"{reached:.3f}", reached >= HIT_OF_IDEAL)
            )
    return seen


def _restart_goals(seen: RestartFigures | None) -> list[Goal]:
    if seen is None:
        return []
    nothing = Repeat(step=0, prompt_tokens=0, reusable_tokens=0, expected=TierTokens(), found=TierTokens())
    first = next(iter(seen.repeats), nothing)
    words = f"{first.found.disk:,} of {first.reusable_tokens:,} tokens from disk"
    return [
        goal(
            "after the restart: the first repeat of an old prefix is served from disk",
            words,
            first.found.disk >= HIT_OF_IDEAL * first.reusable_tokens > 0,
        )
    ]


def _expected_goals(seen: RestartFigures | None, block_tokens: int) -> list[Goal]:
    if seen is None or not seen.repeats:
        return []
    first, count, right = seen.repeats[0], seen.first_repeats, seen.predicted_within_one_block
    so = first.expected.disk > 0 and abs(first.expected.disk - first.found.disk) <= block_tokens
    return [
        goal("and was predicted so, within one block", f"{first.expected.disk:,} tokens expected from disk", so),
        goal("all repeats predicted within one block", f"{right} of {count}", right == count),
    ]


def arms_table(report: SpillReport) -> Table:
    """One row an arm; `device`, `host`, `disk`: the share of prompt tokens that came from there."""
    table = Table(title=f"{report.model}, tiers below the device ({report.engine} {report.engine_version})")
    table.add_column("arm", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for name, cells in rows(report):
        table.add_row(name, *cells)
    return table


def rows(report: SpillReport) -> list[tuple[str, list[str]]]:
    """Name of the arm, then its cells under COLUMNS."""
    return [(name, _cells(arm, report.tiers[name], report.prediction_by_arm.get(name))) for name, arm in report.arms.items()]


def _cells(arm: ArmFigures, tiers: TierTokens, seen: PredictionFigures | None) -> list[str]:
    prompt = max(1, arm.prompt_tokens)
    return [
        *(str(arm.requests), str(arm.errors)),
        *(f"{arm.hit_rate:.3f}", f"{arm.ideal_hit_rate:.3f}", f"{of_ideal(arm):.3f}"),
        *(f"{tokens / prompt:.3f}" for tokens in (tiers.device, tiers.host, tiers.disk)),
        *(f"{arm.ttft_p50_s * 1000:,.0f} ms", f"{arm.ttft_p95_s * 1000:,.0f} ms", f"{arm.requests_per_s:.2f}"),
        *((f"{seen.within_one_block_fraction:.1%}", f"{seen.over_predicted_fraction:.1%}") if seen else ("-", "-")),
    ]


def restart_words(seen: RestartFigures) -> str:
    """What happened around the death, for a person."""
    return (
        f"{seen.replica} was killed and back after {seen.seconds:.0f} s; meanwhile {seen.requests_meanwhile} requests with "
        f"hit rate {seen.hit_rate_meanwhile:.3f}; then {seen.first_repeats} old prompts sent to it again: "
        f"{seen.cached_tokens:,} of {seen.reusable_tokens:,} tokens reused, {seen.disk_tokens:,} of them from disk; "
        f"{seen.predicted_within_one_block} predicted within one block"
    )


def ttft_table(report: SpillReport) -> Table:
    """One row a length."""
    table = Table(title=TTFT_TITLE)
    for column in TTFT_COLUMNS:
        table.add_column(column, justify="right")
    for cells in ttft_rows(report):
        table.add_row(*cells)
    return table


def ttft_rows(report: SpillReport) -> list[list[str]]:
    """Cells under TTFT_COLUMNS."""
    return [
        [length, *(f"{1000 * seconds:,.0f} ms" for seconds in (each.cold_s, each.device_s, each.host_s, each.disk_s))]
        for length, each in report.ttft.items()
    ]


def html(report: SpillReport, arms: Sequence[ArmTokens]) -> str:
    """A complete document."""
    return page.render(report, arms, _heading(report))


def _heading(report: SpillReport) -> page.Heading:
    setup = (
        f"{report.model} on {report.engine} {report.engine_version}. A device holds {report.device_tokens:,} tokens, the "
        f"work needs {report.working_set_tokens:,} ({report.working_set_ratio:.2f} times that). Host memory of a replica: "
        f"{report.host_bytes >> 20:,} MiB; disk: {report.disk_bytes >> 20:,} MiB. Seed {report.seed}, {report.concurrency} "
        f"requests in flight."
    )
    cards = [(f"{arm.hit_rate:.1%}", f"reused: {name.replace('_', ', ')}") for name, arm in report.arms.items()]
    table = _html_table(("arm", *COLUMNS), [[name, *cells] for name, cells in rows(report)])
    words = f"<p>{escape(restart_words(report.restart))}.</p>" if report.restart else ""
    section = f"<section><h2>Where reused tokens came from, as shares of all</h2>{table}{words}</section>"
    if report.ttft:
        times = _html_table(TTFT_COLUMNS, ttft_rows(report))
        section += f"<section><h2>{TTFT_TITLE}</h2><p>{TTFT_HOW}</p>{times}</section>"
    return page.Heading("One workload, four times a device's cache", setup, cards, section)


def _html_table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in cells) for cells in body]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
