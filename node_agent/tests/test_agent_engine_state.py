"""What state and mode follow from what is seen."""

from __future__ import annotations

import pytest

from prefixpool.wire import Mode, State
from prefixpool_agent.engine_state import (
    EVENTS_WITHIN_S,
    HEALTH_FAILURES,
    EventEvidence,
    HealthCount,
    Observed,
    judge,
    judge_mode,
)
from prefixpool_agent.supervisor_client import EnginePhase


@pytest.mark.parametrize(
    ("phase", "healthy", "fenced", "state"),
    [
        (EnginePhase.RUNNING, False, False, State.STARTING),
        (EnginePhase.RUNNING, True, False, State.READY),
        (EnginePhase.RUNNING, True, True, State.FENCED),
        (EnginePhase.BACKOFF, True, False, State.STARTING),  # an answer of before the crash does not count
        (EnginePhase.STOPPED, False, True, State.STOPPED),
        (EnginePhase.GAVE_UP, False, False, State.FAILED),
    ],
)
def test_state(phase: EnginePhase, healthy: bool, fenced: bool, state: State) -> None:
    assert judge(Observed(phase, 7, healthy, fenced)).state is state


def test_failure_says_why_in_the_supervisors_words() -> None:
    found = judge(Observed(EnginePhase.GAVE_UP, 7, False, False, "exit code 1: out of memory"))
    assert (found.epoch, found.reason) == (7, "exit code 1: out of memory")


def evidence(**changes: object) -> EventEvidence:
    return EventEvidence(healthy_since_s=100.0, connected=1, uncached_since_s=float("inf"))._replace(**changes)


@pytest.mark.parametrize(
    ("changes", "after_s", "mode"),
    [
        ({}, 1000.0, Mode.PRECISE),
        ({"connected": 0}, EVENTS_WITHIN_S - 0.1, Mode.PRECISE),
        ({"connected": 0}, EVENTS_WITHIN_S, Mode.APPROXIMATE),
        ({"uncached_since_s": 150.0}, 50.0 + EVENTS_WITHIN_S, Mode.APPROXIMATE),
        ({"uncached_since_s": 150.0}, 50.0 + EVENTS_WITHIN_S / 2, Mode.PRECISE),
        ({"tokenizer": "no tokenizer.json"}, 0.0, Mode.APPROXIMATE),
    ],
)
def test_mode(changes: dict[str, object], after_s: float, mode: Mode) -> None:
    found, reason = judge_mode(evidence(**changes), 100.0 + after_s)
    assert found is mode
    assert bool(reason) == (mode is not Mode.PRECISE)


def test_missing_events_are_known_within_ten_seconds() -> None:
    assert EVENTS_WITHIN_S <= 10.0


def test_busy_engine_is_not_called_down_for_one_late_answer() -> None:
    count = HealthCount()
    count.good()
    for _ in range(HEALTH_FAILURES - 1):
        count.bad(certain=False)
    assert count.healthy
    count.bad(certain=False)
    assert not count.healthy


def test_refused_connection_counts_at_once() -> None:
    count = HealthCount()
    count.good()
    count.bad(certain=True)
    assert not count.healthy
    count.good()
    assert count.healthy
