"""The report: promised keys, goals, and a page that needs nothing from outside."""

import json
import re
from xml.etree import ElementTree as Xml

import msgspec
import pytest
from rich.console import Console

from prefixpool_cli.demo import command, page, plots, report
from prefixpool_cli.demo.greedy import GreedyFigures
from prefixpool_cli.demo.report import ArmTokens, Setup
from prefixpool_cli.demo.samples import Arm, Sample, Tokens

SETUP = Setup(
    engine="sim", engine_version="0", model="<tiny>", replicas=2, block_tokens=4, device_tokens=16, concurrency=4, seed=1
)


def arm(name: str, cached: int, ttft_s: float, *, precise: bool = True) -> ArmTokens:
    samples = tuple(
        Sample(
            step=i, session=i, turn=0, kind="chat", started_s=float(i), first_s=i + ttft_s, ended_s=i + ttft_s + 0.1,
            replica=f"r-{i % 2}", reason="warm", predicted_tokens=cached, prompt_tokens=41, cached_tokens=cached,
        )
        for i in range(4)
    )  # fmt: skip
    tokens = {i: Tokens(tuple(range(41)), tuple(range(41))) for i in range(4)}
    return ArmTokens(Arm(name=name, policy=name, precise=precise, started_s=0.0, ended_s=4.0, samples=samples), tokens)


GREEDY = GreedyFigures(compared=4, equal=3, near_ties=1, wrong=0)
ARMS = [arm("round_robin", 8, 2.0), arm("prefix_approximate", 24, 0.6, precise=False), arm("prefix", 40, 0.5)]


def test_the_promised_keys_are_there() -> None:
    found = json.loads(report.to_json(report.build(SETUP, ARMS, GREEDY)))
    assert {"engine", "model", "replicas", "block_tokens", "arms", "prediction", "greedy"} <= set(found)
    promised = {"requests", "errors", "hit_rate", "ideal_hit_rate", "ttft_p50_s", "ttft_p95_s", "requests_per_s"}
    assert all(promised <= set(figures) for figures in found["arms"].values())
    assert set(found["prediction"]) == {
        "requests",
        "evicted_fraction",
        "within_one_block_fraction",
        "over_predicted_fraction",
        "error_tokens_p50",
        "error_tokens_p95",
        "error_fraction_p95",
    }
    assert list(found["prediction_by_arm"]) == ["round_robin", "prefix"]


def test_predictions_of_the_approximate_arm_are_left_out() -> None:
    found = report.build(SETUP, ARMS, None)
    assert found.prediction.requests == 4  # the 8 tokens of round_robin are too few to be judged


def test_an_arm_beside_the_table_counts_for_predictions_only() -> None:
    beside = ArmTokens(ARMS[2].arm, ARMS[2].tokens, compared=False)
    found = report.build(SETUP, [ARMS[0], beside], None)
    assert list(found.arms) == ["round_robin"]
    assert found.prediction.requests == 4


def test_goals_say_what_was_seen() -> None:
    goals = {goal.goal: goal for goal in report.build(SETUP, ARMS, GREEDY).goals}
    factor = goals["TTFT p50: round_robin at least 2 times prefix"]
    assert (factor.seen, factor.met) == ("4.00", True)
    assert goals["prefix: no other arm reuses more"].met
    assert not goals["at least 20% of requests lost prefix by eviction"].met
    assert goals["greedy answers as from one engine alone"].seen == "3 equal, 1 near-ties, 0 wrong"


def test_a_missed_goal_is_told() -> None:
    slow = [arm("round_robin", 8, 0.5), arm("prefix", 4, 0.5)]
    goals = {goal.goal: goal.met for goal in report.build(SETUP, slow, GREEDY).goals}
    assert goals["prefix: no other arm reuses more"] is False
    assert goals["TTFT p50: round_robin at least 2 times prefix"] is False


def verdict(found: report.Report) -> tuple[bool, str]:
    console = Console(width=300, record=True, quiet=True)
    console.quiet = False
    with console.capture() as capture:
        good = command.told(found.goals, console)
    return good, capture.get()


def only(found: report.Report, *words: str) -> report.Report:
    """Every goal is met but these."""
    goals = [msgspec.structs.replace(one, met=not one.goal.startswith(words)) for one in found.goals]
    return msgspec.structs.replace(found, goals=tuple(goals))


@pytest.mark.parametrize(
    "words",
    [
        "every request answered",
        "working set",
        "prefix: hit rate",
        "prefix: no other arm",
        "at least 20% of requests lost",
        "predictions within",
        "over by more",
        "greedy",
    ],
)
def test_the_demo_ended_well_though_it_had_missed_a_goal(words: str) -> None:
    found = only(report.build(msgspec.structs.replace(SETUP, engine="vllm"), ARMS, GREEDY), words)
    good, told = verdict(found)
    assert not good
    assert told.startswith(f"not met: {words}")


@pytest.mark.parametrize(
    ("engine", "words"), [("vllm", "TTFT"), ("sim", "TTFT"), ("sim", "over by"), ("sim", "predictions")]
)
def test_what_a_busy_machine_makes_worse_is_told_and_fails_nothing(engine: str, words: str) -> None:
    found = only(report.build(msgspec.structs.replace(SETUP, engine=engine), ARMS, GREEDY), words)
    good, told = verdict(found)
    assert good
    assert told.startswith(f"not met, perhaps because the machine is busy: {words}")


def test_nothing_is_said_of_goals_that_are_met() -> None:
    assert verdict(only(report.build(SETUP, ARMS, GREEDY))) == (True, "")


def test_the_page_is_self_contained_and_escaped() -> None:
    text = page.render(report.build(SETUP, ARMS, GREEDY), ARMS)
    assert "&lt;tiny&gt;" in text
    assert "<tiny>" not in text
    assert not re.search(r"(src|href)=|@import|url\(|<script", text)
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        Xml.fromstring(svg)
    assert text.count("<svg") == 3
    assert "$" not in text


def test_tables_show_every_arm() -> None:
    console = Console(width=160, record=True, quiet=True)
    found = report.build(SETUP, ARMS, GREEDY)
    console.quiet = False
    with console.capture() as capture:
        console.print(report.arms_table(found), report.goals_table(found))
    for name in ("round_robin", "prefix_approximate", "prefix"):
        assert name in capture.get()


def test_axes_hold_values_at_their_edges() -> None:
    axis = plots.Axis(0.1, 10.0, 0, 100, log=True)
    assert axis.at(1.0) == 50
    assert axis.at(0.0) == 0
    assert axis.at(99.0) == 100
    assert axis.ticks() == [0.1, 0.2, 0.5, 1, 2, 5, 10]
    assert plots.Axis(0, 1000, 0, 1).ticks() == [0, 200, 400, 600, 800, 1000]


def test_plots_of_nothing_are_still_plots() -> None:
    empty = [plots.Series("a", "c0", [])]
    for svg in (plots.curves(empty, "x"), plots.scatter(empty, 4, "x"), plots.bars([], "x")):
        Xml.fromstring(svg)
