"""Why did this request go there: the last decisions with every candidate's numbers and what really happened.

A decision keeps the numbers as they were (tens of microseconds); prices are computed from them only when somebody asks.
No prompt text, no token ids: depths and counts only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from operator import attrgetter
from typing import Any, Final

import msgspec

from prefixpool.policy.base import Choice, Policy, Query
from prefixpool.policy.candidates import Candidate, Candidates
from prefixpool.wire import Mode
from prefixpool_router.dispatch_types import Outcome, RoutedRequest

_SHOWN: Final = 256  # characters of a model's name: it is the client's, and as long as a body may be
_FIELDS: Final = tuple(Candidate.__slots__)
_numbers = attrgetter(*_FIELDS)


class CandidateNumbers(msgspec.Struct, frozen=True):
    """One candidate as the policy saw it; seconds and tokens."""

    name: str
    device_tokens: int
    held_tokens: int
    inflight: int
    queue_s: float
    prefill_s: float
    total: float
    gated: bool
    trust: float


class Ending(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of one attempt."""

    seconds: float
    status: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    error: str = ""
    aborted: bool = False
    abandoned: str = ""  # nothing reached the client, and why
    replica_down: bool = False


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """One decision, as JSON. `outcome` is null while the request runs."""

    id: str
    at: float  # seconds since 1970
    request_id: str
    path: str
    model: str
    policy: str
    replica: str
    reason: str
    mode: Mode
    predicted_tokens: int
    prompt_tokens: int  # estimated
    block_tokens: int
    excluded: tuple[str, ...]
    candidates: list[CandidateNumbers]
    outcome: Ending | None
    worker: int


class Decision:
    """One attempt, with what is needed to explain it later."""

    __slots__ = (
        "at_s",
        "block_tokens",
        "choice",
        "excluded",
        "id",
        "mode",
        "model",
        "numbers",
        "outcome",
        "path",
        "policy",
        "predicted_tokens",
        "query",
        "request_id",
        "started_s",
    )

    def __init__(
        self, identity: str, request: RoutedRequest, model: str, policy: Policy, query: Query, choice: Choice
    ) -> None:
        self.id = identity
        self.request_id = request.request_id
        self.path = request.path
        self.model = model[:_SHOWN]
        self.policy = policy
        self.query = query
        self.choice = choice
        self.mode = Mode.NONE
        self.predicted_tokens = 0
        self.block_tokens = 0
        self.excluded: tuple[str, ...] = ()
        self.numbers: list[tuple[Any, ...]] = []
        self.at_s = 0.0
        self.started_s = 0.0
        self.outcome: Ending | None = None

    def remember(self, candidates: Iterable[Candidate]) -> None:
        """Keep all numbers as they are now."""
        self.numbers = list(map(_numbers, candidates))

    def ended(self, outcome: Outcome, now: float) -> None:
        """The client got an answer."""
        self.outcome = Ending(
            seconds=round(now - self.started_s, 6),
            status=outcome.status,
            prompt_tokens=outcome.prompt_tokens,
            cached_tokens=outcome.cached_tokens,
            output_tokens=outcome.output_tokens,
            error=outcome.error,
            aborted=outcome.aborted,
        )

    def abandoned(self, why: str, now: float, *, replica_down: bool) -> None:
        """The client got nothing of this attempt."""
        self.outcome = Ending(seconds=round(now - self.started_s, 6), abandoned=why, replica_down=replica_down)

    def explanation(self, worker: int) -> Explanation:
        """Everything, with prices computed from the numbers of then."""
        members = [_candidate(numbers) for numbers in self.numbers]
        trust = {member.name: member.trust for member in members}
        scores = self.policy.scores(self.query, Candidates(members)) if members else []
        return Explanation(
            id=self.id,
            at=round(self.at_s, 3),
            request_id=self.request_id,
            path=self.path,
            model=self.model,
            policy=self.policy.name,
            replica=self.choice.name,
            reason=self.choice.reason,
            mode=self.mode,
            predicted_tokens=self.predicted_tokens,
            prompt_tokens=self.query.prompt_tokens,
            block_tokens=self.block_tokens,
            excluded=self.excluded,
            candidates=[CandidateNumbers(*score, trust=trust[score.name]) for score in scores],
            outcome=self.outcome,
            worker=worker,
        )


class DecisionRing:
    """The last `size` decisions."""

    def __init__(self, size: int) -> None:
        self._ring: deque[Decision] = deque(maxlen=size)
        self.enabled = size > 0

    def __len__(self) -> int:
        return len(self._ring)

    def add(self, decision: Decision) -> None:
        """The oldest one goes."""
        self._ring.append(decision)

    def latest(self, count: int, request_id: str = "") -> list[Decision]:
        """Newest first; all attempts of one request if its id is given."""
        chosen = (d for d in reversed(self._ring) if not request_id or d.request_id == request_id)
        return list(islice(chosen, count))


def _candidate(numbers: tuple[Any, ...]) -> Candidate:
    candidate = Candidate.__new__(Candidate)
    for field, value in zip(_FIELDS, numbers, strict=True):
        setattr(candidate, field, value)
    return candidate
