"""Consistent hashing with bounded loads on the cold key: stateless affinity, the same on every router."""

from __future__ import annotations

from prefixpool.policy.base import Candidates, Choice, Query, Reason, Score
from prefixpool.policy.holdings import Holdings, plain_scores
from prefixpool.policy.least_load import lightest
from prefixpool.ring import bound


class BoundedHash:
    """The key's place on the ring, or the next one that is within its bound."""

    name = "chwbl"

    def choose(self, query: Query, candidates: Candidates) -> Choice:
        """Pick the key's place."""
        if not query.cold_key:
            return lightest(query, candidates, Reason.NO_CHAIN)
        return placed(query, candidates, query.cold_key, Reason.COLD)

    def scores(self, query: Query, candidates: Candidates) -> list[Score]:
        """In-flight counts, and who is at its bound."""
        limit = bound(candidates.total_inflight, len(candidates))
        return [score._replace(gated=score.inflight >= limit) for score in plain_scores(query, candidates)]


def placed(query: Query, candidates: Candidates, key: int, reason: Reason) -> Choice:
    """The place of `key`; COLD becomes COLD_MOVED where the owner was passed over."""
    loads, limit = candidates.loads, bound(candidates.total_inflight, len(candidates))
    placement = candidates.ring.place(key, loads, lambda name: loads[name] < limit)
    if placement.steps and reason is Reason.COLD:
        reason = Reason.COLD_MOVED
    name = placement.final  # never empty: the least loaded is below the mean
    predicted = Holdings(query.levels, query.prompt_tokens).predicted(candidates[name])
    return Choice(name, reason, predicted)
