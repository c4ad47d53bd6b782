"""The report as one HTML file that needs nothing else: no scripts, no fonts, no network. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources
from string import Template
from typing import NamedTuple

from prefixpool_cli.demo import plots
from prefixpool_cli.demo.report import ArmTokens, Report

COLUMNS = (
    "arm", "requests", "errors", "hit rate", "ideal", "TTFT p50", "TTFT p95", "requests/s", "tokens computed",
    "judged", "lost by eviction", "within 1 block", "over by more", "error p95",
)  # fmt: skip


class Heading(NamedTuple):
    """What stands above the plots, and between them and the figures. `cards`: figure and words; `section`: HTML."""

    title: str
    setup: str
    cards: Sequence[tuple[str, str]]
    section: str = ""


def render(report: Report, arms: Sequence[ArmTokens], heading: Heading | None = None) -> str:
    """A complete document; without a heading, that of the demo of policies."""
    heading = heading or Heading("One workload, five ways to route it", _setup(report), _cards(report))
    page = Template(resources.files("prefixpool_cli.demo").joinpath("page.html").read_text(encoding="utf-8"))
    colours = {name: f"c{i % 6}" for i, name in enumerate(a.arm.name for a in arms)}
    compared = [a.arm for a in arms if a.compared]
    ttft = [
        plots.Series(arm.name, colours[arm.name], plots.cumulative([s.ttft_s for s in arm.answered() if s.first_s]))
        for arm in compared
    ]
    seen = [
        plots.Series(a.arm.name, colours[a.arm.name], [(s.predicted_tokens, s.cached_tokens) for s in a.arm.answered()])
        for a in arms
        if a.arm.precise
    ]
    rates = [(name, colours[name], arm.hit_rate, arm.ideal_hit_rate) for name, arm in report.arms.items()]
    return page.substitute(
        title=escape(heading.title),
        setup=escape(heading.setup),
        headline="".join(f"<div><b>{big}</b><span>{escape(small)}</span></div>" for big, small in heading.cards),
        section=heading.section,
        hit_rates=plots.bars(rates, "token hit rate"),
        legend=plots.legend(ttft),
        ttft=plots.curves(ttft, "seconds, logarithmic"),
        prediction_legend=plots.legend(seen),
        prediction=plots.scatter(seen, report.block_tokens, "predicted tokens (across), actual tokens (up)"),
        goals=_goals(report),
        figures=_figures(report),
    )


def _setup(report: Report) -> str:
    return (
        f"{report.model} on {report.replicas} replicas of {report.engine} {report.engine_version}, each with "
        f"{report.device_tokens:,} tokens of cache in blocks of {report.block_tokens}; the work needs "
        f"{report.working_set_tokens:,} ({report.working_set_ratio:.2f} times one replica). "
        f"Seed {report.seed}, {report.concurrency} requests in flight."
    )


def _cards(report: Report) -> list[tuple[str, str]]:
    prefix, blind = report.arms.get("prefix"), report.arms.get("round_robin")
    cards = []
    if prefix is not None:
        cards.append(
            (f"{prefix.hit_rate:.1%}", f"of prompt tokens reused with prefix routing; ideal {prefix.ideal_hit_rate:.1%}")
        )
    if prefix is not None and blind is not None and prefix.ttft_p50_s:
        cards.append((f"{blind.ttft_p50_s / prefix.ttft_p50_s:.1f}×", "sooner first token than round robin, at the median"))
        cards.append((f"{blind.computed_tokens / max(1, prefix.computed_tokens):.1f}×", "fewer prompt tokens computed"))
    if report.prediction.requests:
        cards.append((f"{report.prediction.within_one_block_fraction:.1%}", "of predictions within one block of the truth"))
    return cards


def _goals(report: Report) -> str:
    return "".join(
        f'<tr><td class="{"yes" if g.met else "no"}">{"✓" if g.met else "✗"}</td>'
        f'<td class="words">{escape(g.goal)}</td><td>{escape(g.seen)}</td></tr>'
        for g in report.goals
    )


def _figures(report: Report) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in COLUMNS)
    names = [*report.arms, *(name for name in report.prediction_by_arm if name not in report.arms)]
    best = max(report.arms, key=lambda name: report.arms[name].hit_rate, default="")
    return f"<tr>{head}</tr>" + "".join(_row(report, name, best=name == best) for name in names)


def _row(report: Report, name: str, *, best: bool) -> str:
    arm, seen = report.arms.get(name), report.prediction_by_arm.get(name)
    cells = [name]
    if arm is None:
        cells += [""] * 8
    else:
        cells += [str(arm.requests), str(arm.errors), f"{arm.hit_rate:.3f}", f"{arm.ideal_hit_rate:.3f}"]
        cells += [f"{arm.ttft_p50_s * 1000:,.0f} ms", f"{arm.ttft_p95_s * 1000:,.0f} ms", f"{arm.requests_per_s:.2f}"]
        cells.append(f"{arm.computed_tokens:,}")
    if seen is None:
        cells += [""] * 5
    else:
        cells += [str(seen.requests), f"{seen.evicted_fraction:.1%}", f"{seen.within_one_block_fraction:.1%}"]
        cells += [f"{seen.over_predicted_fraction:.1%}", f"{seen.error_tokens_p95:.0f} tokens"]
    return f'<tr class="{"best" if best else ""}">' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
