"""Trust and prompt length: numbers that decisions rest on. Load: test_router_core_load."""

from __future__ import annotations

from array import array

import pytest

from prefixpool.chain import PrefixChain
from prefixpool_router.closed_loop import Trust
from prefixpool_router.prompt_estimate import DEFAULT_BYTES_PER_TOKEN, NO_ANCHOR, Anchor, PromptEstimate, TokenEstimate

# -- closed loop


def test_right_predictions_keep_full_trust() -> None:
    trust = Trust()
    for _ in range(50):
        trust.observe(1024, 1008, 16)  # one block is the resolution
    assert trust.trust == 1.0
    assert not trust.drifted


def test_over_prediction_costs_trust_and_heals() -> None:
    trust = Trust()
    for _ in range(5):
        trust.observe(1000, 500, 16)
    lowered = trust.trust
    assert 0.7 < lowered < 0.9
    for _ in range(30):
        trust.observe(1000, 1000, 16)
    assert trust.trust > 0.98


def test_under_prediction_costs_no_trust_but_counts_as_drift() -> None:
    trust = Trust()
    changes = [trust.observe(0, 1000, 16) for _ in range(20)]
    assert trust.trust == 1.0
    assert trust.drifted
    assert sum(changes) == 1


def test_a_drifting_picture_heals_when_predictions_hold_again() -> None:
    trust = Trust()
    for _ in range(20):
        trust.observe(1000, 0, 16)
    assert trust.drifted
    assert trust.trust < 0.2
    answers = 0
    while trust.drifted:
        trust.observe(1000, 1000, 16)
        answers += 1
    assert 5 < answers < 40


def test_a_few_bad_answers_are_no_drift() -> None:
    trust = Trust()
    for _ in range(8):
        trust.observe(1000, 0, 16)
    assert not trust.drifted


def test_matches_below_two_blocks_say_nothing() -> None:
    trust = Trust()
    for _ in range(100):
        trust.observe(31, 0, 16)
    assert trust.trust == 1.0


# -- prompt length


def chain_of(*offsets: int, total: int) -> PrefixChain:
    return PrefixChain(
        array("Q", range(1, len(offsets) + 1)), array("I", offsets), array("i", [-1] * len(offsets)), 0, total
    )


def test_bytes_per_token_are_learned_per_model() -> None:
    estimate = TokenEstimate()
    assert estimate.bytes_per_token("a") == DEFAULT_BYTES_PER_TOKEN
    estimate.learn("a", 3000, 1000)
    estimate.learn("b", 2000, 1000)
    assert estimate.bytes_per_token("a") == pytest.approx(3.0)
    assert estimate.bytes_per_token("b") == pytest.approx(2.0)


def test_old_prompts_are_forgotten_gradually() -> None:
    estimate = TokenEstimate()
    for _ in range(100):
        estimate.learn("a", 10_000, 5_000)
    for _ in range(100):
        estimate.learn("a", 10_000, 2_500)
    assert estimate.bytes_per_token("a") == pytest.approx(4.0, rel=0.02)


@pytest.mark.parametrize(("size", "tokens"), [(0, 10), (10, 0), (10, 1000), (10_000, 1)])
def test_ratios_that_no_text_has_are_ignored(size: int, tokens: int) -> None:
    estimate = TokenEstimate()
    estimate.learn("a", size, tokens)
    assert estimate.bytes_per_token("a") == DEFAULT_BYTES_PER_TOKEN


def test_names_from_clients_cannot_fill_memory() -> None:
    estimate = TokenEstimate()
    for i in range(1000):
        estimate.learn(str(i), 3000, 1000)
    assert len(estimate._ratio) <= 64


def test_the_known_depth_of_a_boundary_anchors_the_rest() -> None:
    chain = chain_of(100, 200, 300, 400, total=500)
    depths = {1: 40, 2: 80, 3: 120}
    anchor = Anchor.find(chain, lambda boundary: depths.get(boundary, 0))
    assert anchor == Anchor(300, 120, 3)
    tokens = PromptEstimate(500, 4.0, anchor)
    assert tokens.total == 120 + 50
    assert not tokens.exact
    assert PromptEstimate(300, 4.0, anchor).exact
    assert tokens.depths(chain.offsets) == [40, 80, 120, 145]


def test_without_anchor_the_ratio_decides() -> None:
    chain = chain_of(100, 200, total=400)
    assert Anchor.find(chain, lambda _: 0) == NO_ANCHOR
    assert PromptEstimate(400, 4.0).depths(chain.offsets) == [25, 50]
    assert PromptEstimate(0, 4.0).total == 1
