"""Back-off and giving up: pure."""

from __future__ import annotations

import pytest

from prefixpool_agent.supervisor.restart import AGENT, ENGINE, Restarts


def test_engine_that_crashes_while_serving_is_restarted_ever_more_slowly_and_for_ever() -> None:
    restarts = Restarts(ENGINE)
    assert [restarts.ended(well_s=5) for _ in range(8)] == [1, 2, 4, 8, 16, 30, 30, 30]


def test_engine_that_was_well_for_a_minute_starts_over() -> None:
    restarts = Restarts(ENGINE)
    for _ in range(4):
        restarts.ended(well_s=5)
    assert restarts.ended(well_s=60) == 1


def test_five_starts_that_never_got_well_are_enough() -> None:
    restarts = Restarts(ENGINE)
    assert [restarts.ended(well_s=None) for _ in range(5)] == [1, 2, 4, 8, None]


def test_one_good_start_forgives_the_bad_ones_before_it() -> None:
    restarts = Restarts(ENGINE)
    for _ in range(4):
        restarts.ended(well_s=None)
    assert restarts.ended(well_s=1) is not None
    assert [restarts.ended(well_s=None) is None for _ in range(5)] == [False, False, False, False, True]


def test_asking_for_a_start_forgets_everything() -> None:
    restarts = Restarts(ENGINE)
    for _ in range(5):
        restarts.ended(well_s=None)
    restarts.forget()
    assert restarts.ended(well_s=None) == 1


def test_agent_is_never_given_up() -> None:
    restarts = Restarts(AGENT)
    delays = [restarts.ended(well_s=0.01) for _ in range(20)]
    assert delays[0] == pytest.approx(0.1)
    assert delays[-1] == 5
