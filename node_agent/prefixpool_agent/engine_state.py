"""State of the engine, and how far the picture of its cache may be believed: pure rules over what was observed."""

from __future__ import annotations

from typing import Final, NamedTuple

from prefixpool.wire import Mode, State
from prefixpool_agent.supervisor_client import EnginePhase

EVENTS_WITHIN_S: Final = 8.0  # an engine that serves and sends no events by then has none; routers know it within 10 s
HEALTH_FAILURES: Final = 3  # in a row; one alone may be a busy API server


class Observed(NamedTuple):
    """What supervisor, engine and gate say."""

    phase: EnginePhase
    epoch: int
    healthy: bool
    fenced: bool
    reason: str = ""  # of the supervisor, or of the health check


class EngineState(NamedTuple):
    """What routers are told."""

    state: State
    epoch: int
    reason: str = ""


def judge(observed: Observed) -> EngineState:
    """STARTING also covers the pause before a restart: either way, requests may come back later."""
    match observed.phase:
        case EnginePhase.GAVE_UP:
            return EngineState(State.FAILED, observed.epoch, observed.reason or "the engine never got healthy")
        case EnginePhase.STOPPED:
            return EngineState(State.STOPPED, observed.epoch, observed.reason)
        case EnginePhase.BACKOFF:
            return EngineState(State.STARTING, observed.epoch, observed.reason or "the engine ended")
        case EnginePhase.RUNNING:
            if not observed.healthy:
                return EngineState(State.STARTING, observed.epoch, observed.reason)
            if observed.fenced:
                return EngineState(State.FENCED, observed.epoch, "draining")
            return EngineState(State.READY, observed.epoch)


class EventEvidence(NamedTuple):
    """What speaks for or against a complete event stream in this epoch. Times are monotonic seconds."""

    healthy_since_s: float
    connected: int  # handshakes of the event socket
    uncached_since_s: float  # since when requests with new blocks end without any event since they came; inf: none does
    tokenizer: str = ""  # why there is no table of tokens; "" = there is one


def judge_mode(evidence: EventEvidence, now_s: float) -> tuple[Mode, str]:
    """PRECISE unless something says otherwise; the reason is for a person."""
    if evidence.tokenizer:
        return Mode.APPROXIMATE, evidence.tokenizer
    if not evidence.connected and now_s - evidence.healthy_since_s >= EVENTS_WITHIN_S:
        return Mode.APPROXIMATE, f"no KV event endpoint answered within {EVENTS_WITHIN_S:g} s"
    if now_s - evidence.uncached_since_s >= EVENTS_WITHIN_S:
        return Mode.APPROXIMATE, "the engine answers requests but sends no KV events"
    return Mode.PRECISE, ""


class HealthCount:
    """Smooths the health check: one good answer is enough, a refused connection too, but silence must last."""

    def __init__(self) -> None:
        self.healthy = False
        self._failures = 0

    def good(self) -> None:
        """It answered 200."""
        self.healthy = True
        self._failures = 0

    def bad(self, certain: bool) -> None:
        """`certain`: refused, or an error status; otherwise it just did not answer in time."""
        self._failures = HEALTH_FAILURES if certain else self._failures + 1
        if self._failures >= HEALTH_FAILURES:
            self.healthy = False

    def forget(self) -> None:
        """Another engine."""
        self.healthy = False
        self._failures = 0
