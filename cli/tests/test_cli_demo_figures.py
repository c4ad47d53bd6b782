"""Ideal hit rates, losses by eviction and prediction figures, on small cases worked out by hand."""

import pytest

from prefixpool_cli.demo import figures
from prefixpool_cli.demo.figures import Judged
from prefixpool_cli.demo.ideal import PrefixTree, infinite_cache, lost_to_eviction, reusable
from prefixpool_cli.demo.samples import Arm, Sample, Tokens

BLOCK = 4


def sample(step: int, **values: object) -> Sample:
    given = {"started_s": float(step), "first_s": step + 0.5, "ended_s": step + 0.9, "replica": "r-0", "prompt_tokens": 9}
    return Sample(step=step, session=0, turn=step, kind="chat", **(given | values))  # type: ignore[arg-type]  # test data


def arm(*samples: Sample, precise: bool = True) -> Arm:
    return Arm(name="a", policy="prefix", precise=precise, started_s=0.0, ended_s=10.0, samples=samples)


@pytest.mark.parametrize(("prompt", "most"), [(0, 0), (1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (1024, 1020), (1025, 1024)])
def test_the_last_token_is_never_reused(prompt: int, most: int) -> None:
    assert reusable(prompt, BLOCK) == most


def test_a_tree_matches_whole_blocks_behind_the_same_prefix_only() -> None:
    tree = PrefixTree(BLOCK)
    tree.add([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert tree.tokens == 8
    assert tree.match([1, 2, 3, 4, 5, 6, 7, 8, 0]) == 8
    assert tree.match([1, 2, 3, 4, 5, 6, 7, 8]) == 4
    assert tree.match([1, 2, 3, 4, 5, 6, 0, 0, 0]) == 4
    assert tree.match([5, 6, 7, 8, 1, 2, 3, 4, 0]) == 0


def test_an_infinite_cache_reuses_prompts_and_replies_in_order_of_completion() -> None:
    first = Tokens(tuple(range(9)), tuple(range(13)))
    second = Tokens(tuple(range(14)), tuple(range(14)))
    run = arm(sample(0), sample(1))
    rate, unique = infinite_cache(run, {0: first, 1: second}, BLOCK)
    assert rate == pytest.approx(12 / 23)
    assert unique == 12
    late = arm(sample(0, ended_s=5.0), sample(1))
    rate, _ = infinite_cache(late, {0: first, 1: second}, BLOCK)
    assert rate == pytest.approx(8 / 23)


def test_failed_requests_have_no_part_in_the_ideal() -> None:
    run = arm(sample(0, error="status 500"), sample(1))
    rate, _ = infinite_cache(run, {1: Tokens(tuple(range(9)), ())}, BLOCK)
    assert rate == 0.0


def test_a_replica_that_no_longer_holds_what_it_computed_has_lost_it() -> None:
    same = Tokens(tuple(range(9)), tuple(range(9)))
    run = arm(sample(0), sample(1, cached_tokens=4), sample(2, cached_tokens=8))
    assert lost_to_eviction(run, dict.fromkeys(range(3), same), BLOCK) == {0: 0, 1: 4, 2: 0}


def test_what_another_replica_computed_is_not_lost() -> None:
    same = Tokens(tuple(range(9)), tuple(range(9)))
    run = arm(sample(0), sample(1, replica="r-1"))
    assert lost_to_eviction(run, dict.fromkeys(range(2), same), BLOCK) == {0: 0, 1: 0}


def test_a_neighbour_still_in_flight_is_not_mistaken_for_a_loss() -> None:
    same = Tokens(tuple(range(9)), tuple(range(9)))
    run = arm(sample(0, ended_s=5.0), sample(1, ended_s=6.0))
    assert lost_to_eviction(run, dict.fromkeys(range(2), same), BLOCK) == {0: 0, 1: 0}


def test_predictions_are_judged_by_blocks() -> None:
    seen = figures.prediction_figures(
        [Judged(40, 40, 100, 0), Judged(44, 40, 100, 4), Judged(48, 40, 100, 8), Judged(32, 40, 100, 3)], BLOCK
    )
    assert seen.requests == 4
    assert seen.within_one_block_fraction == 0.5
    assert seen.over_predicted_fraction == 0.25
    assert seen.evicted_fraction == 0.5
    assert seen.error_tokens_p50 == 6.0
    assert seen.error_fraction_p95 == pytest.approx(0.08)


def test_no_predictions_give_zeros_not_a_division_by_zero() -> None:
    assert figures.prediction_figures([], BLOCK).within_one_block_fraction == 0.0


def test_only_requests_with_eight_blocks_predicted_or_actual_are_judged() -> None:
    run = arm(sample(0, predicted_tokens=32), sample(1, cached_tokens=32), sample(2, predicted_tokens=31, cached_tokens=28))
    tokens = dict.fromkeys(range(3), Tokens(tuple(range(9)), ()))
    assert [(j.predicted, j.actual) for j in figures.judged(run, tokens, BLOCK)] == [(32, 0), (0, 32)]


def test_an_arms_rates_are_of_tokens_and_of_answered_requests() -> None:
    run = arm(sample(0, cached_tokens=3), sample(1, cached_tokens=6, reason="warm"), sample(2, error="status 503"))
    tokens = dict.fromkeys(range(2), Tokens(tuple(range(9)), tuple(range(9))))
    seen = figures.arm_figures(run, tokens, BLOCK)
    assert (seen.requests, seen.errors) == (3, 1)
    assert seen.hit_rate == 0.5
    assert seen.ideal_hit_rate == pytest.approx(8 / 18)
    assert seen.requests_per_s == pytest.approx(0.2)
    assert seen.computed_tokens == 9
    assert seen.ttft_p50_s == pytest.approx(0.5)


@pytest.mark.parametrize(("q", "value"), [(0.0, 1.0), (0.5, 2.5), (1.0, 4.0), (0.95, 3.85)])
def test_quantiles_interpolate(q: float, value: float) -> None:
    assert figures.quantile([4.0, 1.0, 3.0, 2.0], q) == pytest.approx(value)
