"""Fewest requests in flight; the cache is not looked at."""

from __future__ import annotations

from prefixpool.policy.base import Candidates, Choice, Query, Reason, Score
from prefixpool.policy.holdings import Holdings, plain_scores


class LeastLoad:
    """Ties are broken by queued prefill, then at random."""

    name = "least_load"

    def choose(self, query: Query, candidates: Candidates) -> Choice:
        """Pick the least loaded replica."""
        return lightest(query, candidates, Reason.LEAST_LOAD)

    def scores(self, query: Query, candidates: Candidates) -> list[Score]:
        """In-flight counts as totals."""
        return plain_scores(query, candidates)


def lightest(query: Query, candidates: Candidates, reason: Reason) -> Choice:
    """Choice by load alone, for this policy and for requests that have nothing else to go by."""
    least = min((member.inflight, member.pending_tokens) for member in candidates)
    tied = [member for member in candidates if (member.inflight, member.pending_tokens) == least]
    best = tied[int(query.draw * len(tied))]
    predicted = Holdings(query.levels, query.prompt_tokens).predicted(best)
    return Choice(best.name, reason, predicted)
