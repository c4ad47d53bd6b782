"""The demo's report: one struct that becomes JSON, a table on the terminal, and a page (`page.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from rich.table import Table

from prefixpool.api.engine import EngineKind
from prefixpool_cli.demo.figures import ArmFigures, PredictionFigures, arm_figures, judged, prediction_figures
from prefixpool_cli.demo.greedy import GreedyFigures
from prefixpool_cli.demo.samples import Arm, Tokens

HIT_OF_IDEAL: Final = 0.9
TTFT_RATIO: Final = 2.0
WITHIN: Final = 0.95
OVER: Final = 0.02
EVICTED: Final = 0.2
WORKING_SET: Final = (1.3, 1.6)


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """What the demo is to show, and what it did show. `timing`: it depends on how busy the machine is; no failure."""

    goal: str
    seen: str
    met: bool
    timing: bool = False


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What ran. `device_tokens`: what one replica can hold, as its engine reports it."""

    engine: str
    engine_version: str
    model: str
    replicas: int
    block_tokens: int
    device_tokens: int
    concurrency: int
    seed: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`build/demo/report.json`. Keys are promised; new ones may come."""

    engine: str
    engine_version: str
    model: str
    replicas: int
    block_tokens: int
    device_tokens: int
    concurrency: int
    seed: int
    working_set_tokens: int
    working_set_ratio: float
    arms: dict[str, ArmFigures]
    prediction: PredictionFigures
    prediction_by_arm: dict[str, PredictionFigures]
    greedy: GreedyFigures | None
    goals: tuple[Goal, ...]

    def errors(self) -> int:
        """Requests that failed, over all arms."""
        return sum(arm.errors for arm in self.arms.values())


class ArmTokens(msgspec.Struct, frozen=True):
    """An arm with the tokens of its requests. `compared`: an arm of the table; else only its predictions count."""

    arm: Arm
    tokens: dict[int, Tokens]
    compared: bool = True


def missed(goals: Sequence[Goal], *, timing: bool) -> str:
    """Those that were not met, in words; empty if all were."""
    return "; ".join(f"{goal.goal} ({goal.seen})" for goal in goals if not goal.met and goal.timing is timing)


def build(setup: Setup, arms: Sequence[ArmTokens], greedy: GreedyFigures | None) -> Report:
    """Pure."""
    block = setup.block_tokens
    figures = {a.arm.name: arm_figures(a.arm, a.tokens, block) for a in arms if a.compared}
    judgements = {a.arm.name: judged(a.arm, a.tokens, block) for a in arms if a.arm.precise}
    pooled = prediction_figures([one for each in judgements.values() for one in each], block)
    by_arm = {name: prediction_figures(each, block) for name, each in judgements.items()}
    working_set = max((f.working_set_tokens for f in figures.values()), default=0)
    ratio = working_set / setup.device_tokens if setup.device_tokens else 0.0
    return Report(
        **msgspec.structs.asdict(setup),
        working_set_tokens=working_set,
        working_set_ratio=ratio,
        arms=figures,
        prediction=pooled,
        prediction_by_arm=by_arm,
        greedy=greedy,
        goals=goals(figures, pooled, ratio, greedy, sim=setup.engine == EngineKind.SIM),
    )


def goals(
    arms: Mapping[str, ArmFigures],
    prediction: PredictionFigures,
    ratio: float,
    greedy: GreedyFigures | None,
    *,
    sim: bool = False,
) -> tuple[Goal, ...]:
    """What the demo promises. Only goals whose arms ran."""
    errors = sum(arm.errors for arm in arms.values())
    low, high = WORKING_SET
    found = [
        goal("every request answered", f"{errors} errors", errors == 0),
        goal(f"working set {low} to {high} times one replica's cache", f"{ratio:.2f}", low <= ratio <= high),
        *_prefix_goals(arms),
        *_evicted_goals(prediction, timing=sim),
        *prediction_goals(prediction, timing=sim),
    ]
    if greedy is not None:
        found.append(greedy_goal(greedy))
    return tuple(found)


def _prefix_goals(arms: Mapping[str, ArmFigures]) -> list[Goal]:
    prefix = arms.get("prefix")
    if prefix is None:
        return []
    of_ideal = prefix.hit_rate / prefix.ideal_hit_rate if prefix.ideal_hit_rate else 0.0
    best = max(arm.hit_rate for arm in arms.values())
    found = [
        goal(f"prefix: hit rate at least {HIT_OF_IDEAL} of ideal", f"{of_ideal:.3f}", of_ideal >= HIT_OF_IDEAL),
        goal("prefix: no other arm reuses more", f"{prefix.hit_rate:.3f}, best {best:.3f}", prefix.hit_rate >= best),
    ]
    blind = arms.get("round_robin")
    if blind is not None and prefix.ttft_p50_s:
        factor = blind.ttft_p50_s / prefix.ttft_p50_s
        found.append(
            goal(
                f"TTFT p50: round_robin at least {TTFT_RATIO:g} times prefix",
                f"{factor:.2f}",
                factor >= TTFT_RATIO,
                timing=True,
            )
        )
    return found


def _evicted_goals(seen: PredictionFigures, *, timing: bool) -> list[Goal]:
    """What makes the goals of predictions hard to meet, hence judged where they are."""
    if not seen.requests:
        return []
    words, evicted = f"at least {EVICTED:.0%} of requests lost prefix by eviction", seen.evicted_fraction
    return [goal(words, f"{evicted:.1%}", evicted >= EVICTED, timing=timing)]


def prediction_goals(seen: PredictionFigures, *, timing: bool = False) -> list[Goal]:
    """None without predictions to judge.

    `timing`: on the sim, whose time runs so fast that agents, which do not, tell of an eviction tens of its milliseconds
    late. The busier the machine, the later, and the more is predicted that has just gone.
    """
    if not seen.requests:
        return []
    within, over = seen.within_one_block_fraction, seen.over_predicted_fraction
    return [
        goal(f"predictions within one block: at least {WITHIN:.0%}", f"{within:.1%}", within >= WITHIN, timing=timing),
        goal(f"over by more than one block: at most {OVER:.0%}", f"{over:.1%}", over <= OVER, timing=timing),
    ]


def greedy_goal(greedy: GreedyFigures) -> Goal:
    """No answer may be wrong."""
    seen = f"{greedy.equal} equal, {greedy.near_ties} near-ties, {greedy.wrong} wrong"
    return goal("greedy answers as from one engine alone", seen, greedy.wrong == 0)


def goal(words: str, seen: str, met: bool, *, timing: bool = False) -> Goal:
    """`words`: what is to be shown."""
    return Goal(goal=words, seen=seen, met=met, timing=timing)


def arms_table(report: Report) -> Table:
    """One row an arm."""
    table = Table(title=f"{report.model} on {report.replicas} replicas ({report.engine} {report.engine_version})")
    table.add_column("arm")
    for column in (
        "requests",
        "errors",
        "hit rate",
        "ideal",
        "TTFT p50",
        "TTFT p95",
        "requests/s",
        "within 1 block",
        "over",
    ):
        table.add_column(column, justify="right")
    for name, arm in report.arms.items():
        seen = report.prediction_by_arm.get(name)
        table.add_row(
            name,
            str(arm.requests),
            str(arm.errors),
            f"{arm.hit_rate:.3f}",
            f"{arm.ideal_hit_rate:.3f}",
            f"{arm.ttft_p50_s * 1000:,.0f} ms",
            f"{arm.ttft_p95_s * 1000:,.0f} ms",
            f"{arm.requests_per_s:.2f}",
            f"{seen.within_one_block_fraction:.1%}" if seen else "-",
            f"{seen.over_predicted_fraction:.1%}" if seen else "-",
        )
    return table


def goals_table(report: Report) -> Table:
    """What was to be shown, and what was."""
    table = Table(show_edge=False)
    for column in ("", "goal", "seen"):
        table.add_column(column)
    for goal in report.goals:
        table.add_row(_mark(goal), goal.goal, goal.seen)
    return table


def _mark(goal: Goal) -> str:
    if goal.met:
        return "[green]✓[/]"
    return "[yellow]·[/]" if goal.timing else "[red]✗[/]"


def to_json(report: Report) -> bytes:
    """Indented, for people, too."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
