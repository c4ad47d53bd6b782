"""Prefill ends as events show them."""

from __future__ import annotations

from prefixpool_agent.progress import Progress


def progress(*steps: tuple[float, int], full: bool = False) -> Progress:
    made = Progress(at_s=10.0, body_bytes=100, full=full)
    for at_s, tokens in steps:
        made.stored(at_s, tokens)
    return made


def test_end_is_the_step_that_stores_the_last_full_block_of_the_prompt() -> None:
    steps = progress((10.5, 64), (11.0, 64), (12.0, 32))
    assert steps.prefill_end_s(prompt=170, cached=32, block_tokens=32) == 11.0  # the last block is of the answer


def test_prompt_without_a_new_block_tells_nothing() -> None:
    assert progress((11.0, 32)).prefill_end_s(prompt=70, cached=64, block_tokens=32) == 0.0


def test_missing_events_tell_nothing() -> None:
    assert progress((11.0, 32)).prefill_end_s(prompt=170, cached=0, block_tokens=32) == 0.0


def test_full_reports_are_no_progress() -> None:
    assert progress((11.0, 320), full=True).prefill_end_s(prompt=170, cached=0, block_tokens=32) == 0.0


def test_memory_is_bounded() -> None:
    steps = progress(*((11.0, 1) for _ in range(10_000)))
    assert len(steps._steps) == 256
