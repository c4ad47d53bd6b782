"""Whether the disk tier does what it is for, from what the engine counts and what the agent sees. Pure.

Single failures are no news: a tier that fails gives misses. What is told is that half or more of what was tried failed,
until something succeeds again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from prefixpool.wire import DiskCause, DiskProblem
from prefixpool_agent.engines.metrics import TierFigures
from prefixpool_agent.tiers.disk_ledger import Failure, store_error

_DONE: Final = {"read": "read", "write": "written"}
_CAUSES: Final = {
    "late": DiskCause.LATE,
    Failure.CORRUPT: DiskCause.DAMAGED,
    Failure.UNREADABLE: DiskCause.BROKEN,
    Failure.DISK_FULL: DiskCause.FULL,
    Failure.READ_ONLY: DiskCause.READ_ONLY,
    Failure.DENIED: DiskCause.DENIED,
    Failure.BROKEN: DiskCause.BROKEN,
}
_WORDS: Final = {
    DiskCause.LATE: "is too late",
    DiskCause.DAMAGED: "finds damaged files",
    DiskCause.FULL: "finds the file system full",
    DiskCause.READ_ONLY: "finds the file system read-only",
    DiskCause.DENIED: "is not permitted",
    DiskCause.BROKEN: "ends in errors of the system",
}


class DiskHealth:
    """Of one engine start, reading by reading of its metrics."""

    def __init__(self) -> None:
        self._seen: Mapping[str, int] = {}
        self._problems: dict[str, DiskProblem] = {}  # by what is done: read, write

    @property
    def problem(self) -> DiskProblem | None:
        """As the engine has it. Writing first: it fails first, and what reads give hides it."""
        return next((self._problems[what] for what in ("write", "read") if what in self._problems), None)

    def forget(self) -> None:
        """The engine is gone."""
        self._seen, self._problems = {}, {}

    def read(self, figures: TierFigures) -> None:
        """One reading."""
        totals = dict(figures.events)
        new = {event: total - self._seen.get(event, 0) for event, total in totals.items()}
        self._seen = totals
        for what, done in _DONE.items():
            failed = Counter({reason: new.get(f"{what}_{reason}", 0) for reason in _CAUSES})
            good, bad = new.get(done, 0), failed.total()
            if bad and bad >= good:
                self._problems[what] = _problem(what, _CAUSES[failed.most_common(1)[0][0]])
            elif good:
                self._problems.pop(what, None)


def _problem(what: str, cause: DiskCause) -> DiskProblem:
    return DiskProblem(cause=cause, words=f"half or more of what it {what}s {_WORDS[cause]}")


def problem_of(error: OSError) -> DiskProblem:
    """Of an agent that looks itself."""
    cause = _CAUSES[store_error(error).failure]
    return DiskProblem(cause=cause, words=f"its directory cannot be used: {error.strerror or error}")
