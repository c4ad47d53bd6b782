"""The demo of tiers: which arms an engine can run, how large tiers are, what a killed replica still served, the report."""

import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from prefixpool.api.engine import EngineKind
from prefixpool_agent.engines.metrics import EngineLoad
from prefixpool_cli.demo import command as demo
from prefixpool_cli.demo import workload
from prefixpool_cli.demo.capacity import estimated_working_set
from prefixpool_cli.demo.greedy import Difference
from prefixpool_cli.demo.report import ArmTokens, Setup, to_json
from prefixpool_cli.demo.samples import Arm, Sample, Tokens
from prefixpool_cli.demo.spill import command, counters, figures, plan, report, ttft
from prefixpool_cli.demo.spill.figures import Death, Repeat, TierTokens
from prefixpool_cli.demo.spill.report import Passed
from prefixpool_cli.demo.spill.ttft import Probe, TierTimes, Way
from prefixpool_cli.errors import CliError

BLOCK = 4
SETUP = Setup(
    engine="vllm", engine_version="0", model="<tiny>", replicas=1, block_tokens=4, device_tokens=10, concurrency=2, seed=1
)
SIZES = plan.Sizes(device_blocks=4, max_model_len=12, host_bytes=1 << 20, disk_bytes=4 << 20)


def sample(step: int, session: int, turn: int, **values: object) -> Sample:
    given = {"started_s": float(step), "first_s": step + 0.5, "ended_s": step + 0.9, "replica": "r-0", "prompt_tokens": 41}
    return Sample(step=step, session=session, turn=turn, kind="chat", **(given | values))  # type: ignore[arg-type]  # test data


def arm(name: str, *samples: Sample) -> Arm:
    return Arm(name=name, policy="prefix", precise=True, started_s=0.0, ended_s=10.0, samples=samples)


def test_the_sim_runs_all_arms_but_that_whose_times_would_be_made_up() -> None:
    assert [one.name for one in plan.arms([], EngineKind.SIM)] == ["device", "host", "host_disk", "shared_restart"]
    assert plan.arms([], EngineKind.VLLM) == list(plan.ARMS)
    with pytest.raises(CliError, match=r"the sim's times are made up: ttft needs --engine vllm"):
        plan.arms(["device", "ttft"], EngineKind.SIM)


def test_arms_that_cannot_be_run_or_judged_are_refused() -> None:
    with pytest.raises(CliError, match="no such arm: nvme"):
        plan.arms(["nvme"], EngineKind.VLLM)
    with pytest.raises(CliError, match="ttft sends no workload"):
        plan.arms(["ttft"], EngineKind.VLLM)


def test_a_device_holds_the_longest_timed_prompt_and_host_memory_twice_as_much() -> None:
    size = plan.timed_sizes(32, 46_080)
    assert size.max_model_len == (size.device_blocks - 1) * 32 >= 4097 + 32
    assert size.host_bytes >= 2 * 4097 * 46_080


def test_the_work_is_four_times_the_device_and_the_host_holds_half_of_it() -> None:
    work = workload.first(workload.load(), plan.REQUESTS)
    size = plan.sizes(work, EngineKind.VLLM, 32, 46_080, 4096)
    device = (size.device_blocks - 1) * 32
    assert estimated_working_set(work, 4.5) / device == pytest.approx(4, abs=0.05)
    assert size.host_bytes == 2 * device * 46_080
    assert size.disk_bytes > 2 * estimated_working_set(work, 4.5) * 46_080
    assert size.max_model_len == device, "a request must fit on the device"
    assert plan.sizes(work, EngineKind.VLLM, 32, 46_080, 1024).max_model_len == 1024


def test_workers_are_told_of_their_arms_tiers_only() -> None:
    words = {one.name: " ".join(plan.worker_args(one, SIZES, "/kv")) for one in plan.ARMS}
    assert words["device"] == ""
    assert words["host"] == "--host-kv-bytes=1048576"
    assert words["host_disk"] == "--host-kv-bytes=1048576 --disk-kv-dir=/kv --disk-kv-bytes=4194304"
    assert words["shared_restart"] == words["host_disk"] + " --disk-kv-shared=true"


def test_tokens_of_all_engines_are_told_by_tier() -> None:
    loads = [EngineLoad(cached_tokens=100, host_tokens=30, disk_tokens=20), EngineLoad(cached_tokens=7, disk_tokens=7)]
    assert figures.tier_tokens(loads) == TierTokens(device=50, host=30, disk=27)


def repeat(step: int, expected: TierTokens, found: TierTokens) -> Repeat:
    return Repeat(step=step, prompt_tokens=41, reusable_tokens=40, expected=expected, found=found)


def restarted() -> Arm:
    """Two sessions; r-0 dies before request 2 and is back for request 3."""
    return arm(
        "shared_restart",
        sample(0, 0, 0),
        sample(1, 1, 0),
        sample(2, 0, 1, replica="r-1", cached_tokens=20),
        sample(3, 1, 1, cached_tokens=40, predicted_tokens=36),
    )


REPEATS = (
    repeat(0, TierTokens(disk=40), TierTokens(disk=40)),
    repeat(1, TierTokens(device=16, disk=24), TierTokens(device=8)),
)
DEATH = Death("r-0", died=2, back=3, seconds=50.0, repeats=REPEATS)


def test_old_prompts_are_the_first_of_different_sessions_on_one_replica() -> None:
    seen = [
        sample(5, 0, 1),
        sample(0, 0, 0),
        sample(1, 1, 0, replica="r-1"),
        sample(2, 2, 0, error="no"),
        sample(3, 3, 0),
        sample(4, 4, 0),
    ]
    assert [one.step for one in figures.old_requests(seen, "r-0", 2)] == [0, 3]
    assert [one.step for one in figures.old_requests(seen, "r-0", 9)] == [0, 3, 4]


def test_a_restart_is_told_by_what_went_on_meanwhile_and_by_the_repeats() -> None:
    seen = figures.restart_figures(restarted(), BLOCK, DEATH)
    assert (seen.requests_meanwhile, seen.hit_rate_meanwhile) == (1, pytest.approx(20 / 41))
    assert (seen.first_repeats, seen.cached_tokens, seen.reusable_tokens, seen.disk_tokens) == (2, 48, 80, 40)
    assert seen.predicted_within_one_block == 1


def test_answers_that_the_device_alone_gave_too_need_no_second_look() -> None:
    said = ({"role": "user", "content": "x"},)
    alone = arm("device", sample(0, 0, 0, messages=said, reply="yes"))
    one = arm("host", sample(0, 0, 0, messages=said, reply="yes"), sample(1, 1, 0, messages=said, reply="no"))
    two = arm("host_disk", sample(0, 0, 0, messages=said, reply="no"))
    assert [s.reply for s in figures.unproven(alone, [one, two])] == ["no"]
    found = figures.greedy_figures([one, two], [Difference(step=1, pool="no", alone="yes", gap=2.0)])
    assert (found.compared, found.equal, found.wrong) == (3, 2, 1)


def probes(tokens: int, cold_s: float, device_s: float, host_s: float, disk_s: float) -> list[Probe]:
    seconds = {Way.COLD: cold_s, Way.DEVICE: device_s, Way.HOST: host_s, Way.DISK: disk_s}
    return [
        Probe(tokens, way, took, TierTokens() if way is Way.COLD else TierTokens(**{way: tokens - 1}))
        for way, took in seconds.items()
    ]


def test_times_are_medians_of_what_came_from_where_it_should() -> None:
    stray = Probe(1025, Way.DISK, 9.0, TierTokens(host=1024))
    seen = ttft.tier_times([*probes(1025, 1, 0.02, 0.03, 0.05), *probes(1025, 3, 0.04, 0.05, 0.07), stray])
    assert list(seen) == ["1025"]
    assert seen["1025"] == TierTimes(
        cold_s=2.0, device_s=pytest.approx(0.03), host_s=pytest.approx(0.04), disk_s=pytest.approx(0.06), probes=9, strays=1
    )


def met(seen: dict[str, TierTimes]) -> dict[str, bool]:
    return {goal.goal: goal.met for goal in ttft.ttft_goals(seen)}


def test_restores_are_judged_against_device_hits_and_the_longest_against_cold_too() -> None:
    good = ttft.tier_times([*probes(1025, 0.2, 0.02, 0.03, 0.05), *probes(4097, 1, 0.04, 0.07, 0.15)])
    assert met(good) == {
        "1025 tokens: host restore / device hit: at most 1.8": True,
        "1025 tokens: disk restore / device hit: at most 4": True,
        "4097 tokens: host restore / device hit: at most 1.8": True,
        "4097 tokens: disk restore / device hit: at most 4": True,
        "4097 tokens: disk restore / cold: at most 0.15": True,
        "timed prefixes came whole from where they should": True,
    }
    bad = met(ttft.tier_times([*probes(1025, 0.2, 0.02, 0.03, 0.09), *probes(4097, 1, 0.04, 0.08, 0.155)]))
    assert [words for words, reached in bad.items() if not reached] == [
        "1025 tokens: disk restore / device hit: at most 4",
        "4097 tokens: host restore / device hit: at most 1.8",
        "4097 tokens: disk restore / cold: at most 0.15",
    ]


def test_slow_restores_are_told_and_fail_nothing(tmp_path: Path) -> None:
    slow = ttft.ttft_goals(ttft.tier_times(probes(4097, 1, 0.04, 0.08, 0.17)))
    assert [goal.met for goal in slow] == [False, False, False, True]
    console = Console(width=200)
    with console.capture() as capture:
        assert demo.told(slow, console)
    assert capture.get().startswith("not met, perhaps because the machine is busy: 4097 tokens: host restore")


def test_a_restore_that_was_never_seen_is_no_fast_one() -> None:
    strays = [Probe(4097, way, 0.1, TierTokens()) for way in Way if way is not Way.COLD]
    assert not any(met(ttft.tier_times([Probe(4097, Way.COLD, 1.0, TierTokens()), *strays])).values())
    assert ttft.ttft_goals({}) == []


def test_chunks_on_disk_are_counted_by_what_happened_to_them() -> None:
    text = """# TYPE prefixpool:disk_events counter
prefixpool:disk_events_total{engine="0",event="written"} 32.0
prefixpool:disk_events_total{engine="0",event="read"} 7.0
vllm:prompt_tokens_cached_by_source_total{engine="0",source="disk"} 64.0
"""
    seen = counters.parse(text)
    assert (seen.written_chunks, seen.load.disk_tokens) == (32, 64)
    assert counters.parse("").written_chunks == 0


def passed(name: str, cached: int, tiers: TierTokens) -> Passed:
    samples = [sample(i, 0, i, cached_tokens=cached, predicted_tokens=cached) for i in range(4)]
    tokens = {i: Tokens(tuple(range(41)), tuple(range(41))) for i in range(4)}
    return Passed(requests=ArmTokens(arm(name, *samples), tokens), replicas=1, tiers=tiers)


def whole(death: Death = DEATH) -> list[Passed]:
    run = restarted()
    last = Passed(
        requests=ArmTokens(run, {one.step: Tokens(tuple(range(41)), tuple(range(41))) for one in run.samples}),
        replicas=2,
        tiers=TierTokens(device=50, disk=58),
        restart=figures.restart_figures(run, BLOCK, death),
    )
    return [passed("device", 4, TierTokens(device=16)), passed("host_disk", 40, TierTokens(device=16, disk=144)), last]


def goals(death: Death = DEATH, setup: Setup = SETUP) -> dict[str, tuple[str, bool]]:
    return {goal.goal: (goal.seen, goal.met) for goal in report.build(setup, SIZES, whole(death), {}, None).goals}


FIRST = "after the restart: the first repeat of an old prefix is served from disk"
SO = "and was predicted so, within one block"
ALL = "all repeats predicted within one block"


def test_goals_are_met_or_not_by_what_was_seen() -> None:
    seen = goals()
    assert seen["device alone: below 0.6 of ideal"][1]
    assert seen["host_disk: hit rate at least 0.9 of ideal"][1]
    assert seen[FIRST] == ("40 of 40 tokens from disk", True)
    assert seen[SO] == ("40 tokens expected from disk", True)
    assert seen[ALL] == ("1 of 2", False)


@pytest.mark.parametrize(
    ("expected", "found", "met"),
    [
        (TierTokens(disk=40), TierTokens(disk=36), (True, True, True)),
        (TierTokens(disk=40), TierTokens(disk=32), (False, False, False)),
        (TierTokens(device=40), TierTokens(disk=40), (True, False, True)),  # it was taken to be on the device
        (TierTokens(), TierTokens(disk=40), (True, False, False)),
        (TierTokens(device=40), TierTokens(device=40), (False, False, True)),  # nothing came from disk
    ],
)
def test_the_first_repeat_counts_only_if_the_disk_served_it_and_was_expected_to(
    expected: TierTokens, found: TierTokens, met: tuple[bool, bool, bool]
) -> None:
    seen = goals(DEATH._replace(repeats=(repeat(0, expected, found),)))
    assert (seen[FIRST][1], seen[SO][1], seen[ALL][1]) == met


def test_a_restart_without_repeats_shows_nothing() -> None:
    seen = goals(DEATH._replace(repeats=()))
    assert not seen[FIRST][1]


def test_predictions_of_the_sim_are_no_goal() -> None:
    words = {"predictions within one block: at least 95%", SO, ALL}
    assert words <= set(goals())
    on_sim = goals(setup=msgspec.structs.replace(SETUP, engine="sim"))
    assert not words & set(on_sim), "its time runs faster than agents look"
    assert on_sim[FIRST][1]


def test_the_file_has_the_demos_keys_and_those_of_tiers() -> None:
    found = json.loads(to_json(report.build(SETUP, SIZES, whole(), {}, None)))
    assert {"engine", "model", "arms", "prediction", "greedy", "goals", "tiers", "restart", "host_bytes"} <= set(found)
    assert list(found["arms"]) == ["device", "host_disk", "shared_restart"]
    assert found["tiers"]["host_disk"] == {"device": 16, "host": 0, "disk": 144}
    assert found["replicas_by_arm"]["shared_restart"] == 2
    assert found["restart"]["first_repeats"] == 2
    assert found["restart"]["repeats"][0]["found"] == {"device": 0, "host": 0, "disk": 40}


def test_table_and_page_show_tiers() -> None:
    found = report.build(SETUP, SIZES, whole(), ttft.tier_times(probes(4097, 1, 0.04, 0.07, 0.15)), None)
    console = Console(width=200)
    with console.capture() as capture:
        console.print(report.arms_table(found))
        console.print(report.ttft_table(found))
    assert re.search(r"4097 . 1,000 ms . +40 ms . +70 ms . +150 ms", capture.get())
    assert re.search(r"host_disk .* 0\.098 . 0\.000 . 0\.878 ", capture.get())
    text = report.html(found, [one.requests for one in whole()])
    assert "&lt;tiny&gt;" in text
    assert "<tiny>" not in text
    assert "Where reused tokens came from" in text
    assert "<td>4097</td><td>1,000 ms</td><td>40 ms</td>" in text
    assert "five ways" not in text
    assert "$" not in text


def test_a_missed_goal_is_named_and_ends_in_failure(tmp_path: Path) -> None:
    found = report.build(SETUP, SIZES, whole(), {}, None)
    console = Console(width=200)
    with console.capture() as capture:
        assert command.told(found, [], tmp_path, console) is False
    last = capture.get().splitlines()[-1]
    assert last.startswith("not met: ")
    assert ALL in last
    assert "device alone" not in last, "that one was met"
    good = msgspec.structs.replace(found, goals=tuple(goal for goal in found.goals if goal.met))
    with console.capture() as capture:
        assert command.told(good, [], tmp_path, console) is True
    assert "not met" not in capture.get()


@pytest.mark.slow
def test_the_demo_of_tiers_runs_on_the_sim(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    arms = ["--arm", "device", "--arm", "shared_restart", "--requests", "44"]
    words = ["demo", "--spill", "--engine", "sim", *arms, "--out", str(out)]
    ran = subprocess.run([sys.executable, "-m", "prefixpool_cli", *words], capture_output=True, text=True, timeout=170)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads((out / "spill.json").read_text())
    assert list(found["arms"]) == ["device", "shared_restart"]
    assert {one["errors"] for one in found["arms"].values()} == {0}
    assert found["tiers"]["device"]["disk"] == 0
    assert found["restart"]["repeats"][0]["found"]["disk"] > 0
    assert found["greedy"]["compared"] == 44 + found["restart"]["first_repeats"]
    assert found["ttft"] == {}
    assert (out / "spill.html").read_text().startswith("<!doctype html>")
    assert not list(out.glob("kv-*")), "what lay on disk is gone"
