"""What hangs, and what was only not asked for a while."""

from __future__ import annotations

from prefixpool.silence import Silence


def test_it_hangs_after_so_long_and_so_many_questions() -> None:
    silence = Silence(0.0, allowed_s=20.0)
    assert [silence.missed(at_s) for at_s in (6.0, 12.0, 18.0, 24.0)] == [False, False, False, True]


def test_an_answer_begins_the_count_anew() -> None:
    silence = Silence(0.0, allowed_s=20.0)
    assert not silence.missed(19.0)
    silence.answered(25.0)
    assert [silence.missed(at_s) for at_s in (31.0, 37.0, 44.0, 45.0)] == [False, False, False, True]


def test_who_slept_for_an_hour_asks_again_first() -> None:
    """A suspended `prefixpool up` must not end a router for its first late answer."""
    silence = Silence(0.0, allowed_s=20.0)
    assert [silence.missed(at_s) for at_s in (3600.0, 3601.0, 3602.0)] == [False, False, True]
