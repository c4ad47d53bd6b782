"""How deep to load: never dearer than the two plain answers, and what the engine is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixpool.policy.cost import DEFAULT_RATES, LOAD_SHARE, Rates, pool_rates, rates
from prefixpool.policy.loading import RETRIED, Cut, Depths, cheapest, load_s, order, retried
from prefixpool.wire import Costs

SECONDS = st.floats(0, 1e-2, allow_subnormal=False)
DEPTHS = st.lists(st.integers(0, 3000), min_size=4, max_size=4).map(sorted)


def costing(host_s: float, disk_s: float, p1: float = 1e-4, p2: float = 0.0) -> Rates:
    return DEFAULT_RATES._replace(p1=p1, p2=p2, host_s_per_token=host_s, disk_s_per_token=disk_s)


def cost_s(cut: Cut) -> float:
    return cut.load_s + cut.compute_s


def at(depths: Depths, cut: int, prompt_tokens: int, given_rates: Rates) -> float:
    """Loading up to a cut, token by token, and computing the rest, token by token."""
    loads = [
        given_rates.host_s_per_token if token < depths.host else given_rates.disk_s_per_token
        for token in range(depths.device, cut)
    ]
    return sum(loads) + sum(given_rates.p1 + given_rates.p2 * (2 * token + 1) for token in range(cut, prompt_tokens))


@given(DEPTHS, SECONDS, SECONDS, SECONDS, st.floats(0, 1e-5, allow_subnormal=False))
def test_the_cut_costs_no_more_than_any_other(tokens: list[int], host_s: float, disk_s: float, p1: float, p2: float) -> None:
    depths, prompt, given_rates = Depths(*tokens[:3]), tokens[3] + 1, costing(host_s, disk_s, p1, p2)
    chosen = cheapest(depths, prompt, given_rates)
    assert cost_s(chosen) == pytest.approx(at(depths, chosen.cached, prompt, given_rates), rel=1e-6, abs=1e-9)
    ends = {depths.device, depths.host, depths.held}
    assert chosen.cached in ends
    for other in ends | {*range(depths.device, depths.held, max(1, (depths.held - depths.device) // 7))}:
        assert cost_s(chosen) <= at(depths, other, prompt, given_rates) * (1 + 1e-6) + 1e-9


def test_each_tier_is_loaded_only_if_that_is_cheaper_than_computing_it() -> None:
    depths = Depths(1000, 2000, 3000)
    assert cheapest(depths, 4000, costing(1e-5, 2e-5)).cached == 3000
    assert cheapest(depths, 4000, costing(1e-5, 2e-4)).cached == 2000, "the disk is slower than computing"
    assert cheapest(depths, 4000, costing(2e-4, 3e-4)).cached == 1000, "so is host memory"


def test_a_dear_tier_is_loaded_if_what_lies_behind_it_is_worth_it() -> None:
    # Computing the part in host memory would mean computing the part on disk, too.
    assert cheapest(Depths(0, 1000, 3000), 4000, costing(1.5e-4, 1e-5)).cached == 3000


def test_what_is_deep_is_dearer_to_compute() -> None:
    dear = costing(1e-4, 3e-4, p1=1e-4, p2=1e-7)
    assert cheapest(Depths(0, 0, 500), 1000, dear).cached == 0
    assert cheapest(Depths(20_000, 20_000, 20_500), 21_000, dear).cached == 20_500


def test_all_on_the_device_needs_no_choice() -> None:
    assert cheapest(Depths(800, 800, 800), 1000, costing(9.0, 9.0)) == Cut(800, 0.0, pytest.approx(0.02))


def test_loading_costs_by_tier() -> None:
    given_rates = costing(1e-5, 1e-4)
    assert load_s(Depths(100, 300, 700), 700, given_rates) == pytest.approx(200 * 1e-5 + 400 * 1e-4)
    assert load_s(Depths(100, 300, 700), 300, given_rates) == pytest.approx(200 * 1e-5)
    assert load_s(Depths(100, 300, 700), 100, given_rates) == 0


def test_the_engine_is_told_what_not_to_load() -> None:
    depths = Depths(100, 300, 700)
    assert order(depths, 700) == {}
    assert order(depths, 300) == {"kv_load_tiers": [{"medium": "CPU"}]}
    assert order(depths, 100) == {"max_load_tokens": 0}
    assert order(Depths(100, 100, 700), 100) == {"max_load_tokens": 0}
    assert order(Depths(0, 700, 700), 0) == {"max_load_tokens": 0}


def test_a_tier_that_was_dear_once_is_tried_again_now_and_then() -> None:
    count = 1 << 15
    assert sum(retried(number / count + 1e-9 * number) for number in range(count)) == pytest.approx(RETRIED * count, rel=0.1)


def test_costs_of_loading_that_nobody_measured_are_a_share_of_computing() -> None:
    pool = pool_rates([Costs(prefill_s_per_token=2e-4)])
    assert pool.host_s_per_token == pool.disk_s_per_token == pytest.approx(LOAD_SHARE * 2e-4)


def test_a_replica_that_has_not_loaded_yet_is_reckoned_like_those_that_have() -> None:
    measured = Costs(prefill_s_per_token=1e-4, host_s_per_token=5e-5, disk_s_per_token=8e-5)
    pool = pool_rates([measured, Costs()])
    assert rates(Costs(), pool)[-2:] == (5e-5, 8e-5)
    assert pool_rates([Costs(prefill_s_per_token=1e-4, host_s_per_token=5e-5)]).disk_s_per_token == 5e-5, "never nearer"
