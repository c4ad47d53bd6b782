"""Costs: right figures from clean requests, and none from requests that waited for others."""

from __future__ import annotations

import random

import pytest

from prefixpool.wire import Costs
from prefixpool_agent import costs as costs_module
from prefixpool_agent.costs import MIN_ROWS, Clean, CostModel, NonNegativeFit, Served, Timeline

P0, P1, P2, D0, D1 = 0.010, 4e-4, 2e-8, 0.030, 0.002


def prefill_s(uncached: int, cached: int) -> float:
    return P0 + P1 * uncached + P2 * uncached * (uncached + 2 * cached)


def served(
    at_s: float,
    uncached: int,
    cached: int = 0,
    output: int = 20,
    *,
    id_: str = "",
    wait_s: float = 0.0,
    streamed: bool = True,
) -> Served:
    first = at_s + wait_s + prefill_s(uncached, cached)
    return Served(id_ or f"r{at_s}", at_s, first, first + (output - 1) * D0, uncached, cached, output, streamed)


def run(requests: list[Served]) -> CostModel:
    model = CostModel()
    play(requests, model)
    return model


def judged(requests: list[Served]) -> list[Clean]:
    return play(requests, CostModel())


def play(requests: list[Served], model: CostModel) -> list[Clean]:
    """Let requests arrive and end in the order of time."""
    timeline = Timeline(model.prefill_s)
    out: list[Clean] = []
    moments = [(r.at_s, 0, r) for r in requests] + [(r.end_s, 1, r) for r in requests]
    for _, kind, request in sorted(moments, key=lambda m: m[:2]):
        if kind == 0:
            timeline.arrived(request.id, request.at_s)
            continue
        for clean in timeline.ended(request):
            model.observe(clean)
            out.append(clean)
    return out


def alone(count: int, seed: int = 7, streamed: bool = True) -> list[Served]:
    draw = random.Random(seed)
    sizes = [(draw.randrange(50, 8000), draw.choice((0, 512, 4096)), draw.randrange(2, 80)) for _ in range(count)]
    return [served(100.0 * i, m, c, n, streamed=streamed) for i, (m, c, n) in enumerate(sizes)]


def test_recovers_the_costs_of_requests_that_ran_alone() -> None:
    costs = run(alone(60)).costs()
    assert costs.prefill_s_per_token == pytest.approx(P1, rel=0.02)
    assert costs.prefill_s_per_token2 == pytest.approx(P2, rel=0.05)
    assert costs.decode_step_s == pytest.approx(D0, rel=0.01)
    assert costs.samples == 60


def test_answers_that_are_not_streamed_tell_the_same_by_their_sums() -> None:
    costs = run(alone(80, streamed=False)).costs()
    assert costs.prefill_s_per_token == pytest.approx(P1, rel=0.05)
    assert costs.decode_step_s == pytest.approx(D0, rel=0.05)


def test_requests_that_queued_behind_a_prefill_do_not_count() -> None:
    good = alone(40)
    end = good[-1].end_s + 100
    # Each second request waits until the prefill of the first is over: its time to first token is twice as long.
    queued = []
    for i in range(40):
        first = served(end + 100 * i, 4000)
        queued += [first, served(end + 100 * i + 0.01, 4000, wait_s=first.first_s - first.at_s, id_=f"q{i}")]
    assert run(good + queued).costs().prefill_s_per_token == pytest.approx(P1, rel=0.02)


def test_slope_per_sequence_comes_from_requests_that_decoded_together() -> None:
    requests = alone(10)
    at = 5000.0
    for i in range(30):
        others = i % 4
        steps, step_s = 100, D0 + D1 * others
        for k in range(others + 1):
            first = at + 0.1 + 1e-6 * k
            requests.append(Served(f"{i}/{k}", at + 1e-7 * k, first, first + steps * step_s, 200, 0, steps + 1, True))
        at += 100
    costs = run(requests).costs()
    assert costs.decode_step_s == pytest.approx(D0, rel=0.05)
    assert costs.decode_step_s_per_sequence == pytest.approx(D1, rel=0.2)


def test_decode_step_is_right_although_others_prefill_in_between() -> None:
    requests = []
    for i in range(40):
        at = 100.0 * i
        other = served(at + 1.0, 3000, id_=f"o{i}", output=2)
        disturbed = served(at, 500, output=60)
        pause = other.first_s - other.at_s  # one long step instead of a short one
        requests += [other, disturbed._replace(end_s=disturbed.end_s + pause - D0)]
    assert run(requests).costs().decode_step_s == pytest.approx(D0, rel=0.03)


def test_answers_that_are_not_streamed_do_not_hide_the_others() -> None:
    requests = alone(20)
    start = requests[-1].end_s + 100
    for i in range(30):
        at = start + 100 * i
        requests += [served(at, 1000, output=50, id_=f"w{i}", streamed=False), served(at + 0.8, 300, output=5, id_=f"s{i}")]
    clean = [c for c in judged(requests) if c.served.id.startswith("s")]
    assert all(c.prefill_alone for c in clean)
    assert len(clean) == 30


def test_one_prefill_that_seemed_to_take_no_time_made_prefill_free_for_a_thousand_requests() -> None:
    good = alone(200)
    at = good[-1].end_s + 100
    odd = Served("odd", at, at + 0.001, at + 0.6, 4000, 0, 20, True)
    assert run([*good, odd]).costs().prefill_s_per_token == pytest.approx(P1, rel=0.2)


def test_every_request_had_all_figures_solved_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    solved = 0

    class Counting(NonNegativeFit):
        def solve(self) -> list[float]:
            nonlocal solved
            solved += 1
            return super().solve()

    monkeypatch.setattr(costs_module, "NonNegativeFit", Counting)
    model = run(alone(500))
    assert solved < 500 / 4
    assert model.costs().prefill_s_per_token == pytest.approx(P1, rel=0.02)


def test_follows_a_replica_that_became_slower() -> None:
    fast = alone(50)
    start = fast[-1].end_s + 100
    slow = [
        r._replace(first_s=r.at_s + 3 * (r.first_s - r.at_s), end_s=r.end_s + 2 * (r.first_s - r.at_s))
        for r in alone(400, 8)
    ]
    moved = [
        r._replace(id=f"s{i}", at_s=r.at_s + start, first_s=r.first_s + start, end_s=r.end_s + start)
        for i, r in enumerate(slow)
    ]
    assert run(fast + moved).costs().prefill_s_per_token == pytest.approx(3 * P1, rel=0.15)


def test_too_few_requests_publish_nothing() -> None:
    costs = run(alone(MIN_ROWS - 1)).costs()
    assert (costs.prefill_s_per_token, costs.decode_step_s) == (0.0, 0.0)
    assert costs.output_tokens > 0


def test_few_equal_requests_are_explained_by_the_linear_term() -> None:
    costs = run([served(100.0 * i, 1000) for i in range(5)]).costs()
    assert costs.prefill_s_per_token * 1000 == pytest.approx(prefill_s(1000, 0), rel=0.02)


def test_figures_of_an_earlier_agent_stand_until_there_are_own_ones() -> None:
    earlier = Costs(prefill_s_per_token=1e-3, decode_step_s=0.05, output_tokens=77.0, samples=10)
    model = CostModel(earlier)
    assert model.costs() == earlier


def test_failed_requests_are_ignored_but_still_disturb_others() -> None:
    model = CostModel()
    timeline = Timeline(model.prefill_s)
    timeline.arrived("ok", 0.0)
    timeline.arrived("bad", 0.1)
    assert timeline.ended(Served("bad", 0.1, 0.0, 1.0, 0, 0, 0, True)) == []  # what ran beside it is not over
    (clean,) = [c for c in timeline.ended(served(0.0, 4000, id_="ok")) if c.served.id == "ok"]
    assert not clean.prefill_alone
    model.observe(clean)
    assert model.costs().prefill_s_per_token == 0.0


def test_a_request_is_judged_only_when_all_that_overlap_are_over() -> None:
    timeline = Timeline(lambda served: 0.0)
    timeline.arrived("long", 0.0)
    timeline.arrived("short", 1.0)
    assert timeline.ended(served(1.0, 100, id_="short")) == []
    judged = timeline.ended(Served("long", 0.0, 0.5, 60.0, 100, 0, 50, True))
    by_id = {clean.served.id: clean for clean in judged}
    assert by_id["short"].prefill_alone
    assert by_id["short"].others == pytest.approx(1.0)
    assert not by_id["long"].decode_alone  # the short one's prefill ran meanwhile


def test_memory_stays_bounded_when_ends_never_come() -> None:
    timeline = Timeline(lambda served: 0.0)
    for i in range(20_000):
        timeline.arrived(str(i), float(i))
        timeline.ended(served(float(i), 10, id_=f"x{i}"))
    assert len(timeline._live) <= 4096
    assert len(timeline._waiting) <= 256


def test_coefficients_never_go_below_zero() -> None:
    fit = NonNegativeFit((1e-6, 1e-6))
    for x in (1.0, 2.0, 3.0):
        fit.add((x, x * x), 10.0 * x - x * x)  # the best square term is negative
    assert min(fit.solve()) >= 0
