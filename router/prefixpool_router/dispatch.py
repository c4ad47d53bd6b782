"""From a parsed request to a chosen, booked replica, and from its outcome back into what is known (design: 5, 4.6).

All of it runs inline on the event loop: a decision is tens to hundreds of microseconds, and nothing can change between
choosing and booking.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import mmh3

from prefixpool.chain import PrefixChain, canonical, prefix_chain
from prefixpool.errors import RequestError, SettingsError
from prefixpool.index import Level
from prefixpool.policy.base import Policy, Query
from prefixpool.policy.holdings import Holdings
from prefixpool.policy.registry import named
from prefixpool.wire import Mode
from prefixpool_router.closed_loop import comparable
from prefixpool_router.dispatch_types import Outcome, RoutedRequest
from prefixpool_router.explain import Decision, DecisionRing
from prefixpool_router.fleet import Fleet
from prefixpool_router.knowledge import CONFIRM_S, LONGEST_REQUEST_S, Promise
from prefixpool_router.load import Booking
from prefixpool_router.metrics import RoutingMetrics
from prefixpool_router.paths import LIGHT
from prefixpool_router.pictures import Account
from prefixpool_router.prompt_estimate import NO_ANCHOR, Anchor, PromptEstimate, TokenEstimate
from prefixpool_router.replica import Replica

BUSY: Final = "busy"  # `why` of attempts that a gate without a free place refused
STOPPING: Final = frozenset({"fenced", "shutdown", "empty"})  # `why` of attempts that an engine on its way out refused


class Prompt(NamedTuple):
    """What routing makes of one request."""

    model: str
    chain: PrefixChain | None
    levels: list[Level]
    tokens: PromptEstimate


class FleetDispatcher:
    """Implements dispatch_types.Dispatcher on a fleet."""

    def __init__(
        self,
        fleet: Fleet,
        metrics: RoutingMetrics,
        decisions: DecisionRing,
        *,
        policy: str,
        draw: Callable[[], float] = random.random,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.fleet = fleet
        self.metrics = metrics
        self.decisions = decisions
        self.estimate = TokenEstimate()
        self._policies: dict[str, Policy] = {"": named(policy)}
        self._draw = draw
        self._wall = wall
        self._ids = itertools.count(1)

    def dispatch(self, request: RoutedRequest, exclude: frozenset[str] = frozenset()) -> FleetDispatch:
        """Choose and book. Raises RequestError: 503 nobody is left, 404 the model is unknown, 400 no such policy."""
        started = self.fleet.clock()
        policy = self._policy(request.policy)
        prompt = self._prompt(request)
        candidates = self.fleet.eligible(prompt.model, exclude, light=request.path in LIGHT)
        number = next(self._ids)
        query = self._query(request, prompt, number)
        choice = policy.choose(query, candidates)
        decision = Decision(f"{number:x}", request, prompt.model, policy, query, choice)
        decision.started_s, decision.at_s, decision.excluded = started, self._wall(), tuple(sorted(exclude))
        if self.decisions.enabled:
            decision.remember(candidates)
            self.decisions.add(decision)
        attempt = FleetDispatch(self, self.fleet.replicas[choice.name], request, prompt, decision)
        self.metrics.decisions.labels(choice.name, choice.reason).inc()
        self.metrics.decision_seconds.observe(self.fleet.clock() - started)
        return attempt

    def when_room(self, wake: Callable[[int], None]) -> None:
        """See dispatch_types.Dispatcher."""
        self.fleet.wake = wake

    def _policy(self, name: str) -> Policy:
        policy = self._policies.get(name)
        if policy is None:
            try:
                policy = self._policies[name] = named(name)
            except SettingsError as error:
                raise RequestError(400, str(error), code="unknown_policy") from error
        return policy

    def _prompt(self, request: RoutedRequest) -> Prompt:
        model = _model(request.body)
        chain = self._chain(request)
        if chain is None or not chain.hashes:
            size = len(request.body_bytes)
            return Prompt(model, None, [], PromptEstimate(size, self.estimate.bytes_per_token(model)))
        knowledge = self.fleet.knowledge
        levels = knowledge.match(chain.hashes, self.fleet.block_tokens)
        anchor = Anchor.find(chain, knowledge.depth) if levels else NO_ANCHOR
        return Prompt(model, chain, levels, PromptEstimate(chain.total_bytes, self.estimate.bytes_per_token(model), anchor))

    def _chain(self, request: RoutedRequest) -> PrefixChain | None:
        if request.body is None:
            return None
        day = datetime.fromtimestamp(self._wall(), UTC).date().isoformat()
        content = canonical(request.path, request.body, template=self.fleet.template, salt=request.scope_salt, day=day)
        return prefix_chain(content) if content is not None else None

    def _query(self, request: RoutedRequest, prompt: Prompt, turn: int) -> Query:
        chain = prompt.chain
        cold = chain is not None and chain.cold >= 0
        # An engine always computes the last token, so what is cached is less than the prompt, whatever the estimate says.
        least = prompt.levels[-1].tokens + (not prompt.tokens.exact) if prompt.levels else 1
        return Query(
            levels=prompt.levels,
            prompt_tokens=max(prompt.tokens.total, least),
            cold_key=chain.hashes[chain.cold] if chain is not None and cold else 0,
            session_key=mmh3.hash64(request.session, signed=False)[0] if request.session else 0,
            draw=self._draw(),
            turn=turn,
            cold_tokens=prompt.tokens.at(chain.offsets[chain.cold]) if chain is not None and cold else 0,
        )


class FleetDispatch:
    """Implements dispatch_types.Dispatch: one attempt, its booking and promise undone exactly once."""

    def __init__(
        self, dispatcher: FleetDispatcher, replica: Replica, request: RoutedRequest, prompt: Prompt, decision: Decision
    ) -> None:
        self._dispatcher = dispatcher
        self._replica = replica
        self._comparable = comparable(request.path, request.body)  # the body itself is not kept while the answer runs
        self._prompt = prompt
        self._decision = decision
        self._mode = replica.mode
        self._ended = False
        self._prefilled = False
        holdings = Holdings(prompt.levels, decision.query.prompt_tokens)
        held = holdings.of(replica.pictures.bit(self._mode))[1]
        self._known = self._known_facts()
        self._facts_tokens = self._comparable_facts(holdings)
        self._predicted = held - held % replica.block_tokens
        self._booking: Booking = replica.load.book(max(0, decision.query.prompt_tokens - held))
        self._promise: Promise | None = self._promised()
        decision.mode, decision.predicted_tokens, decision.block_tokens = self._mode, self._predicted, replica.block_tokens
        dispatcher.fleet.weigh(replica)

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
        return self._predicted

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
            self._dispatcher.fleet.weigh(self._replica)

    def finish(self, outcome: Outcome) -> None:
        """An answer, good or bad, went to the client."""
        if not self._end():
            return
        served = outcome.status == 200 and (not outcome.error or self._prefilled)
        self._settle(served=served or outcome.cached_tokens is not None, prompt_tokens=outcome.prompt_tokens)
        self._decision.ended(outcome, self._dispatcher.fleet.clock())
        if outcome.status == 200:
            self._learn(outcome)
        self._dispatcher.fleet.judge(self._replica)

    def abandon(self, why: str, *, replica_down: bool) -> None:
        """Nothing reached the client. The booking is released before anything else is chosen."""
        if not self._end():
            return
        self._settle(served=False)
        self._decision.abandoned(why, self._dispatcher.fleet.clock(), replica_down=replica_down)
        self._dispatcher.metrics.abandoned.labels(self.replica, why).inc()
        if replica_down:
            self._replica.went_down(why)
        elif why in STOPPING:
            self._replica.was_fenced()
        elif why == BUSY:
            self._replica.was_full()
        self._dispatcher.fleet.judge(self._replica)

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
        known, promised = min(self._known.tokens, self._decision.query.prompt_tokens - 1), holdings.of(facts.bit)[1]
        return known if promised - known < self._replica.block_tokens else None

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
        until = self._dispatcher.fleet.clock() + (LONGEST_REQUEST_S if precise else self._replica.pictures.history_ttl_s)
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
            self._promise.confirm_by(self._dispatcher.fleet.clock() + CONFIRM_S)
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
            until = self._dispatcher.fleet.clock() + pictures.history_ttl_s
            picture.promise(chain.hashes, tokens.of(chain.offsets), until).keep()

    def _learn(self, outcome: Outcome) -> None:
        if outcome.prompt_tokens is None or not self._comparable:
            return
        chain = self._prompt.chain
        if chain is not None:
            self._dispatcher.estimate.learn(self._prompt.model, chain.total_bytes, outcome.prompt_tokens)
            if outcome.cached_tokens is not None:
                self._compare(outcome.prompt_tokens, outcome.cached_tokens)

    def _compare(self, prompt_tokens: int, cached: int) -> None:
        replica, metrics, name = self._replica, self._dispatcher.metrics, self._replica.name
        metrics.prompt_tokens.labels(name).inc(prompt_tokens)
        metrics.cached_tokens.labels(name).inc(cached)
        metrics.predicted_tokens.labels(name).inc(self._predicted)
        direction = "over" if self._predicted > cached else "under"
        metrics.prediction_error.labels(name, direction).observe(abs(self._predicted - cached))
        pictures, block = replica.pictures, replica.block_tokens
        if self._facts_tokens is not None:
            pictures.facts_trust.observe(self._facts_tokens, cached, block)
        if self._mode is Mode.APPROXIMATE:
            pictures.history_trust.observe(self._predicted, cached, block)


def _model(body: Mapping[str, Any] | None) -> str:
    model = body.get("model") if body is not None else None
    return model if isinstance(model, str) else ""
