"""When to start a process that ended again. Pure: no clock, no processes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """`first_s` doubling to `max_s`; a process that was well for `reset_after_s` starts over."""

    first_s: float
    max_s: float
    reset_after_s: float
    give_up_after: int = 0  # starts in a row that never got well; 0: never give up


ENGINE = Backoff(first_s=1.0, max_s=30.0, reset_after_s=60.0, give_up_after=5)
AGENT = Backoff(first_s=0.1, max_s=5.0, reset_after_s=10.0)


class Restarts:
    """Counts the ends of one process."""

    def __init__(self, rule: Backoff) -> None:
        self._rule = rule
        self._delay_s = rule.first_s
        self._failed_starts = 0

    def ended(self, *, well_s: float | None) -> float | None:
        """Seconds until the next start; None: give up. `well_s`: how long it had been well, None: it never was."""
        self._failed_starts = 0 if well_s is not None else self._failed_starts + 1
        if 0 < self._rule.give_up_after <= self._failed_starts:
            return None
        if well_s is not None and well_s >= self._rule.reset_after_s:
            self._delay_s = self._rule.first_s
        delay_s = self._delay_s
        self._delay_s = min(delay_s * 2, self._rule.max_s)
        return delay_s

    def forget(self) -> None:
        """A person or the agent asked for a start: begin anew."""
        self._delay_s = self._rule.first_s
        self._failed_starts = 0
