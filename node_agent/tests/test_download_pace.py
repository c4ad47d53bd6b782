"""A download from which no bytes come any more: told, and begun anew."""

from __future__ import annotations

import pytest

from prefixpool_agent.download.pace import STALLED, STALLED_S, STUCK_S, Pace, StuckError


def test_silence_is_told_until_bytes_come_again() -> None:
    pace = Pace(0.0)
    pace.seen(10, 0.0)
    assert pace.problem(STALLED_S - 1) == ""
    pace.seen(10, STALLED_S)
    assert pace.problem(STALLED_S) == STALLED
    pace.seen(11, STALLED_S + 1)
    assert pace.problem(STALLED_S + 1) == ""
    assert pace.problem(2 * STALLED_S) == ""
    assert pace.problem(2 * STALLED_S + 1) == STALLED


def test_bytes_now_and_then_are_progress_however_long_it_takes() -> None:
    pace = Pace(0.0)
    for turn in range(1000):
        pace.seen(turn, turn * (STALLED_S - 1))
        assert pace.problem(turn * (STALLED_S - 1)) == ""


def test_what_was_removed_is_no_progress_and_what_comes_behind_it_is() -> None:
    pace = Pace(0.0)
    pace.seen(1000, 0.0)
    pace.seen(200, STALLED_S)
    assert pace.problem(STALLED_S) == STALLED
    pace.seen(201, STALLED_S + 1)
    assert pace.problem(STALLED_S + 1) == ""


def test_one_that_is_stuck_ends_and_the_next_process_goes_on_telling_it() -> None:
    pace = Pace(0.0)
    pace.seen(10, 0.0)
    pace.seen(11, 50.0)
    assert pace.problem(50.0 + STUCK_S - 1) == STALLED
    with pytest.raises(StuckError) as stuck:
        pace.problem(50.0 + STUCK_S)
    assert stuck.value.since_s == 50.0
    following = Pace(700.0, stuck.value.since_s)
    following.seen(3, 700.0)  # without the parts that the one before it had
    assert following.problem(701.0) == STALLED, "not told for the moment, told again five minutes later, and so on"
    following.seen(4, 702.0)
    assert following.problem(702.0) == ""
