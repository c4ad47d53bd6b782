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
from typing import Any

import mmh3

from prefixpool.chain import PrefixChain, canonical, prefix_chain
from prefixpool.errors import RequestError, SettingsError
from prefixpool.policy.base import Policy, Query
from prefixpool.policy.registry import named
from prefixpool_router.attempt import Books, FleetDispatch, Prompt
from prefixpool_router.dispatch_types import RoutedRequest
from prefixpool_router.explain import Decision, DecisionRing
from prefixpool_router.fleet import Fleet
from prefixpool_router.metrics import RoutingMetrics
from prefixpool_router.paths import LIGHT
from prefixpool_router.prompt_estimate import Anchor, PromptEstimate, TokenEstimate


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
        self._books = Books(fleet, metrics, self.estimate)
        self._policies: dict[str, Policy] = {"": named(policy)}
        self._draw = draw
        self._wall = wall
        self._ids = itertools.count(1)

    def dispatch(self, request: RoutedRequest, exclude: frozenset[str] = frozenset()) -> FleetDispatch:
        """See dispatch_types.Dispatcher."""
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
        attempt = FleetDispatch(self._books, self.fleet.replicas[choice.name], request, prompt, decision)
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
        light = request.path in LIGHT  # nothing of it is computed, so nothing of it comes to be cached
        chain = None if light else self._chain(request)
        if chain is None or not chain.hashes:
            size = 0 if light else len(request.body_bytes)
            return Prompt(model, None, [], PromptEstimate(size, self.estimate.bytes_per_token(model)))
        walk = self.fleet.knowledge.walk(chain.hashes, self.fleet.block_tokens)
        tokens = PromptEstimate(chain.total_bytes, self.estimate.bytes_per_token(model), Anchor.reached(chain, walk))
        return Prompt(model, chain, walk.levels, tokens)

    def _chain(self, request: RoutedRequest) -> PrefixChain | None:
        if request.body is None:
            return None
        template = self.fleet.template
        day = datetime.fromtimestamp(self._wall(), UTC).date().isoformat() if template.prints_date else ""
        content = canonical(request.path, request.body, template=template, salt=request.scope_salt, day=day)
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
            session_key=_session_key(request.session) if request.session else 0,
            draw=self._draw(),
            turn=turn,
            cold_tokens=prompt.tokens.at(chain.offsets[chain.cold]) if chain is not None and cold else 0,
        )


def _session_key(session: str) -> int:
    """Of a client's bytes, since mmh3 crashes on text that has none: headers that are not UTF-8 are read with surrogates."""
    return mmh3.hash64(session.encode("utf-8", "surrogatepass"), signed=False)[0]


def _model(body: Mapping[str, Any] | None) -> str:
    model = body.get("model") if body is not None else None
    return model if isinstance(model, str) else ""
