"""One after the other."""

from __future__ import annotations

from prefixpool.policy.base import Candidates, Choice, Query, Reason, Score
from prefixpool.policy.holdings import Holdings, plain_scores


class RoundRobin:
    """In the order of names, by the query's turn."""

    name = "round_robin"

    def choose(self, query: Query, candidates: Candidates) -> Choice:
        """Pick the replica whose turn it is."""
        members = sorted(candidates, key=lambda member: member.name)
        chosen = members[query.turn % len(members)]
        predicted = Holdings(query.levels, query.prompt_tokens).predicted(chosen)
        return Choice(chosen.name, Reason.ROUND_ROBIN, predicted)

    def scores(self, query: Query, candidates: Candidates) -> list[Score]:
        """In-flight counts, for information."""
        return plain_scores(query, candidates)
