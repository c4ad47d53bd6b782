"""When a disk tier counts as failing, and as what."""

from __future__ import annotations

import errno

import pytest

from prefixpool.wire import DiskCause
from prefixpool_agent.disk_health import DiskHealth, problem_of
from prefixpool_agent.engines.metrics import TierFigures


def figures(**events: int) -> TierFigures:
    return TierFigures(events=tuple(events.items()))


@pytest.mark.parametrize(
    ("events", "cause"),
    [
        ({"write_disk_full": 1}, DiskCause.FULL),
        ({"write_read_only": 1}, DiskCause.READ_ONLY),
        ({"write_denied": 2, "write_broken": 1}, DiskCause.DENIED),
        ({"write_broken": 1}, DiskCause.BROKEN),
        ({"read_late": 9, "read": 9}, DiskCause.LATE),
        ({"write_late": 1}, DiskCause.LATE),
        ({"read_corrupt": 1}, DiskCause.DAMAGED),
        ({"read_unreadable": 1}, DiskCause.BROKEN),
        ({"read_unreadable": 1, "write_read_only": 1}, DiskCause.READ_ONLY),
    ],
)
def test_tier_of_which_half_fails_is_told_as_failing(events: dict[str, int], cause: DiskCause) -> None:
    health = DiskHealth()
    health.read(figures(**events))
    assert health.problem is not None
    assert health.problem.cause is cause


@pytest.mark.parametrize(
    "events",
    [
        {},
        {"read": 5, "written": 5},
        {"read": 100, "read_corrupt": 1, "written": 100, "write_late": 1},
        {"read_absent": 50, "write_full": 50, "write_skipped": 50, "evicted_capacity": 50, "left_over": 1},
    ],
)
def test_single_failures_and_what_belongs_to_the_trade_are_none(events: dict[str, int]) -> None:
    health = DiskHealth()
    health.read(figures(**events))
    assert health.problem is None


def test_it_is_told_until_something_succeeds_again() -> None:
    health = DiskHealth()
    health.read(figures(written=1000))
    health.read(figures(written=1000, write_disk_full=1))
    assert health.problem is not None
    health.read(figures(written=1000, write_disk_full=1, read=70))
    assert health.problem is not None, "reads say nothing of writes"
    health.read(figures(written=1001, write_disk_full=1, read=70))
    assert health.problem is None


def test_another_engine_counts_from_nothing() -> None:
    health = DiskHealth()
    health.read(figures(written=9, write_disk_full=9))
    health.forget()
    assert health.problem is None
    health.read(figures(written=1))
    assert health.problem is None
    health.read(figures(written=1, write_disk_full=1))
    assert health.problem is not None


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (errno.EACCES, DiskCause.DENIED),
        (errno.EROFS, DiskCause.READ_ONLY),
        (errno.ENOSPC, DiskCause.FULL),
        (errno.ENOENT, DiskCause.BROKEN),
        (errno.ESTALE, DiskCause.BROKEN),
    ],
)
def test_errors_of_the_agents_own_look_have_a_cause(number: int, cause: DiskCause) -> None:
    assert problem_of(OSError(number, "words")).cause is cause
