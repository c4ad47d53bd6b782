"""The timing model is the formula that its module states."""

from __future__ import annotations

import pytest

from prefixpool_agent.sim.timing import Prefill, StepShape, TimingModel

MODEL = TimingModel(
    step_s=1.0, sequence_s=0.1, context_s=0.01, prefill_s=0.5, prefill_s2=0.001, request_s=3.0, restore_s=0.25
)


@pytest.mark.parametrize(
    ("shape", "seconds"),
    [
        (StepShape(0, 0, []), 1.0),
        (StepShape(2, 100, []), 1.0 + 0.2 + 1.0),
        (StepShape(0, 0, [Prefill(10, 0)]), 1.0 + 5.0 + 0.1),
        (StepShape(0, 0, [Prefill(10, 20)]), 1.0 + 5.0 + 0.001 * 10 * 50),
        (StepShape(1, 7, [Prefill(10, 0), Prefill(4, 4)], requests=2, restored_tokens=4), 1.17 + 5.1 + 2.048 + 6.0 + 1.0),
    ],
)
def test_seconds(shape: StepShape, seconds: float) -> None:
    assert MODEL.seconds(shape) == pytest.approx(seconds)


def test_chunks_of_a_prompt_cost_what_the_whole_costs() -> None:
    whole = MODEL.seconds(StepShape(0, 0, [Prefill(1000, 0)])) - MODEL.step_s
    parts = sum(MODEL.seconds(StepShape(0, 0, [Prefill(250, behind)])) - MODEL.step_s for behind in (0, 250, 500, 750))
    assert parts == pytest.approx(whole)
