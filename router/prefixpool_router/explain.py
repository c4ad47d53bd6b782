"""Why did this request go there: the last decisions with every candidate's numbers and what really happened.

A decision keeps the numbers as they were (tens of microseconds); prices are computed from them only when somebody asks.
No prompt text, no token ids: depths and counts only.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any, Final

import msgspec

from prefixpool.policy.base import Choice, Policy, Query
from prefixpool.policy.candidates import Candidate, Candidates, Numbers
from prefixpool.wire import Mode
from prefixpool_router.dispatch_types import Outcome, RoutedRequest
from prefixpool_router.forecast import Forecast

_SHOWN: Final = 256  # characters of a model's name: it is the client's, and as long as a body may be


class CandidateNumbers(msgspec.Struct, frozen=True):
    """One candidate as the policy saw it; seconds and tokens."""

    name: str
    device_tokens: int  # held there, tier by tier
    host_tokens: int
    disk_tokens: int
    held_tokens: int  # the sum
    cached_tokens: int  # of these, what would be used: the rest is cheaper to compute
    load_s: float
    inflight: int
    queue_s: float
    prefill_s: float
    total: float
    gated: bool
    trust: float


class Tiers(msgspec.Struct, frozen=True, kw_only=True):
    """What was expected of the chosen replica's tiers. The tokens add up to `predicted_tokens`."""

    device_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    held_tokens: int = 0  # in any tier, used or not
    load_s: float = 0.0  # bringing back what is used and not on the device
    recompute_s: float = 0.0  # computing all that is held below the device, instead
    told: dict[str, Any] = {}  # what the engine was told, as its `kv_transfer_params`


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
    tiers: Tiers = Tiers()
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
        "forecast",
        "id",
        "mode",
        "model",
        "numbers",
        "outcome",
        "path",
        "policy",
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
        self.forecast: Forecast | None = None
        self.block_tokens = 0
        self.excluded: tuple[str, ...] = ()
        self.numbers: list[Numbers] = []
        self.at_s = 0.0
        self.started_s = 0.0
        self.outcome: Ending | None = None

    def remember(self, candidates: Candidates) -> None:
        """Keep all numbers as they are now."""
        self.numbers = candidates.numbers()

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
        members = list(map(Candidate.of, self.numbers))
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
            predicted_tokens=self.forecast.cached if self.forecast is not None else 0,
            prompt_tokens=self.query.prompt_tokens,
            block_tokens=self.block_tokens,
            excluded=self.excluded,
            tiers=_tiers(self.forecast) if self.forecast is not None else Tiers(),
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


def _tiers(forecast: Forecast) -> Tiers:
    device, host, disk = forecast.by_tier().values()
    return Tiers(
        device_tokens=device,
        host_tokens=host,
        disk_tokens=disk,
        held_tokens=forecast.depths.held,
        load_s=forecast.cut.load_s,
        recompute_s=forecast.recompute_s,
        told=dict(forecast.told),
    )
