"""One attempt on a chosen replica: what it books at once, and what its outcome teaches (design: 5, 4.6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from prefixpool.chain import PrefixChain
from prefixpool.comparable import comparable
from prefixpool.levels import Level
from prefixpool.note import MAX_BODY_BYTES
from prefixpool.policy.holdings import Holdings
from prefixpool.policy.loading import Depths
from prefixpool.wire import Mode, Tier
from prefixpool_router.dispatch_types import Outcome, RoutedRequest
from prefixpool_router.explain import Decision
from prefixpool_router.fleet import Fleet
from prefixpool_router.forecast import forecast
from prefixpool_router.knowledge import CONFIRM_S, LONGEST_REQUEST_S, Promise
from prefixpool_router.load import Booking
from prefixpool_router.metrics import RoutingMetrics
from prefixpool_router.pictures import Account
from prefixpool_router.prompt_estimate import Anchor, PromptEstimate, TokenEstimate
from prefixpool_router.replica import Replica
from prefixpool_router.reservation import reservation

KEY_REFUSED: Final = "key_refused"  # `why` of attempts whose engine does not take our key
BUSY: Final = "busy"  # `why` of attempts that a gate without a free place refused
STOPPING: Final = frozenset({"fenced", "shutdown", "empty"})  # `why` of attempts that an engine on its way out refused

_NOTED_BYTES: Final = MAX_BODY_BYTES - (1 << 16)  # the gate labels a body before it notes it
_TIER_LABELS: Final = {tier: tier.name.lower() for tier in Tier}


class Prompt(NamedTuple):
    """What routing makes of one request."""

    model: str
    chain: PrefixChain | None
    levels: list[Level]
    tokens: PromptEstimate


class Books(NamedTuple):
    """What all attempts of a router write into."""

    fleet: Fleet
    metrics: RoutingMetrics
    estimate: TokenEstimate


class FleetDispatch:
    """Implements dispatch_types.Dispatch: one attempt, its booking and promise undone exactly once."""

    def __init__(self, books: Books, replica: Replica, request: RoutedRequest, prompt: Prompt, decision: Decision) -> None:
        self._books = books
        self._replica = replica
        # The body itself is not kept while the answer runs.
        self._comparable = request.body is not None and comparable(request.body)
        self._prompt = prompt
        self._decision = decision
        self._mode = replica.mode
        self._ended = False
        self._prefilled = False
        query = decision.query
        holdings = Holdings(prompt.levels, query.prompt_tokens)
        self._forecast = forecast(
            Depths(*holdings.of(replica.pictures.bit(self._mode))),
            query.prompt_tokens,
            replica.candidate.rates,
            block_tokens=replica.block_tokens,
            draw=query.draw,
            steered=request.steers_loading,
        )
        if replica.has_host_memory and (kept := reservation(request, query.prompt_tokens, decision.at_s)):
            self._forecast = self._forecast._replace(told={**self._forecast.told, **kept})
        self._known = self._known_facts()
        self._facts_tokens = self._comparable_facts(holdings)
        uncached = max(0, query.prompt_tokens - self._forecast.cut.cached)
        self._booking: Booking = replica.load.book(uncached, books.fleet.clock(), whole=_is_told_whole(request, prompt))
        self._promise: Promise | None = self._promised()
        decision.mode, decision.forecast, decision.block_tokens = self._mode, self._forecast, replica.block_tokens
        for tier in self._forecast.refused():
            books.metrics.refused_loads.labels(replica.name, _TIER_LABELS[tier]).inc()
        books.fleet.weigh(replica)

    @property
    def replica(self) -> str:
        return self._replica.name

    @property
    def engine_url(self) -> str:
        """Origin without a trailing slash."""
        return self._replica.member.engine

    @property
    def predicted_tokens(self) -> int:
        """Cached tokens expected, in whole blocks, fixed at dispatch."""
        return self._forecast.cached

    @property
    def kv_transfer_params(self) -> Mapping[str, Any]:
        """See dispatch_types.Dispatch."""
        return self._forecast.told

    @property
    def reason(self) -> str:
        """One word of policy.base.Reason."""
        return self._decision.choice.reason

    @property
    def id(self) -> str:
        return self._decision.id

    @property
    def lost(self) -> bool:
        """See dispatch_types.Dispatch."""
        return self._replica.out_of_reach

    def first_byte(self) -> None:
        """Prefill is over: the first output arrived."""
        if not self._ended and not self._prefilled:
            self._prefilled = True
            self._booking.prefilled()
            self._books.fleet.weigh(self._replica)

    def finish(self, outcome: Outcome) -> None:
        """An answer, good or bad, went to the client."""
        if not self._end():
            return
        served = outcome.status == 200 and (not outcome.error or self._prefilled)
        self._settle(served=served or outcome.cached_tokens is not None, prompt_tokens=outcome.prompt_tokens)
        self._decision.ended(outcome, self._books.fleet.clock())
        drift_changed = outcome.status == 200 and self._learn(outcome)
        (self._books.fleet.judge if drift_changed else self._books.fleet.weigh)(self._replica)

    def abandon(self, why: str, *, replica_down: bool) -> None:
        """Nothing reached the client. The booking is released before anything else is chosen."""
        if not self._end():
            return
        self._settle(served=False)
        self._decision.abandoned(why, self._books.fleet.clock(), replica_down=replica_down)
        if self._counted:
            self._books.metrics.abandoned.labels(self.replica, why).inc()
        if replica_down:
            self._replica.went_down(why)
        elif why in STOPPING:
            self._replica.was_fenced()
        elif why == KEY_REFUSED:
            self._replica.reach.doubt_key()
        elif why == BUSY:
            self._replica.was_full()
        self._books.fleet.judge(self._replica)

    def _end(self) -> bool:
        """False if the attempt has ended already."""
        if self._ended:
            return False
        self._ended = True
        self._booking.release()
        return True

    def _comparable_facts(self, holdings: Holdings) -> int | None:
        """What the agent's account alone predicts; None: there is none, or the prediction rests on a running request.

        Facts that have drifted are not used, but still compared: that is how they are found to be right again.
        """
        facts = self._replica.pictures.facts
        if facts is None or self._known is None:
            return None
        known, (*_, promised) = min(self._known.tokens, self._decision.query.prompt_tokens - 1), holdings.of(facts.bit)
        if promised - known >= self._replica.block_tokens:
            return None
        return known if self._forecast.whole else min(known, self._forecast.cut.cached)

    def _known_facts(self) -> Anchor | None:
        """The deepest of its boundaries that the agent's account has; None: there is no whole account, or no chain."""
        pictures, chain = self._replica.pictures, self._prompt.chain
        if chain is None or pictures.facts is None or pictures.account is not Account.WHOLE:
            return None
        return Anchor.find(chain, pictures.facts.depth)

    def _promised(self) -> Promise | None:
        chain, picture = self._prompt.chain, self._replica.pictures.in_use(self._mode)
        if chain is None or picture is None:
            return None
        precise = self._mode is Mode.PRECISE
        until = self._books.fleet.clock() + (LONGEST_REQUEST_S if precise else self._replica.pictures.history_ttl_s)
        facts = self._known.boundaries if precise and self._known is not None else 0  # they need no promise
        return picture.promise(chain.hashes[facts:], self._prompt.tokens.of(chain.offsets[facts:]), until)

    def _settle(self, *, served: bool, prompt_tokens: int | None = None) -> None:
        """End the promise; what was served is a fact soon, or history from now on."""
        if self._promise is None:
            return
        mode = self._replica.mode  # perhaps another than at the start
        if not served:
            self._promise.undo()
        elif mode is Mode.PRECISE:
            self._promise.confirm_by(self._books.fleet.clock() + CONFIRM_S)
        elif prompt_tokens:
            self._promise.undo()
            self._remember(mode, prompt_tokens)
        else:
            self._promise.keep()

    def _remember(self, mode: Mode, prompt_tokens: int) -> None:
        """As history, at true depths: the length of the prompt is known now."""
        chain, pictures = self._prompt.chain, self._replica.pictures
        picture = pictures.in_use(mode)
        if chain is not None and picture is not None:
            tokens = PromptEstimate(chain.total_bytes, chain.total_bytes / prompt_tokens)
            until = self._books.fleet.clock() + pictures.history_ttl_s
            picture.promise(chain.hashes, tokens.of(chain.offsets), until).keep()

    def _learn(self, outcome: Outcome) -> bool:
        """True if the replica's facts have drifted since, or are right again."""
        chain = self._prompt.chain
        if outcome.prompt_tokens is None or not self._comparable or chain is None:
            return False
        self._books.estimate.learn(self._prompt.model, chain.total_bytes, outcome.prompt_tokens)
        return outcome.cached_tokens is not None and self._compare(outcome.prompt_tokens, outcome.cached_tokens)

    @property
    def _counted(self) -> bool:
        """Its replica, or another of that name, is a member: the series of those that left must not come back."""
        return self.replica in self._books.fleet.replicas

    def _compare(self, prompt_tokens: int, cached: int) -> bool:
        replica, predicted, by_tier = self._replica, self._forecast.cached, self._forecast.by_tier()
        for tier, tokens in by_tier.items():
            replica.predicted[tier] += tokens
        if self._counted:
            self._count(prompt_tokens, cached, by_tier)
        pictures, block = replica.pictures, replica.block_tokens
        if self._mode is Mode.APPROXIMATE:
            pictures.history_trust.observe(predicted, cached, block)
        return self._facts_tokens is not None and pictures.facts_trust.observe(self._facts_tokens, cached, block)

    def _count(self, prompt_tokens: int, cached: int, by_tier: Mapping[Tier, int]) -> None:
        metrics, name, predicted = self._books.metrics, self.replica, self._forecast.cached
        metrics.prompt_tokens.labels(name).inc(prompt_tokens)
        metrics.cached_tokens.labels(name).inc(cached)
        for tier, tokens in by_tier.items():
            metrics.predicted_tokens.labels(name, _TIER_LABELS[tier]).inc(tokens)
        direction = "over" if predicted > cached else "under"
        metrics.prediction_error.labels(name, direction).observe(abs(predicted - cached))


def _is_told_whole(request: RoutedRequest, prompt: Prompt) -> bool:
    """Only its agent can say when the prompt is computed: the answer is not streamed, and the gate's note has its text."""
    noted = prompt.chain is not None and len(request.body_bytes) <= _NOTED_BYTES
    return noted and request.body is not None and not request.body.get("stream")
