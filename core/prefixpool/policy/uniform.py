"""Any replica, at random."""

from __future__ import annotations

from prefixpool.policy.base import Candidates, Choice, Query, Reason, Score
from prefixpool.policy.holdings import Holdings, plain_scores


class Uniform:
    """The query's draw decides."""

    name = "random"

    def choose(self, query: Query, candidates: Candidates) -> Choice:
        """Pick any replica."""
        members = sorted(candidates, key=lambda member: member.name)
        chosen = members[int(query.draw * len(members))]
        predicted = Holdings(query.levels, query.prompt_tokens).predicted(chosen)
        return Choice(chosen.name, Reason.RANDOM, predicted)

    def scores(self, query: Query, candidates: Candidates) -> list[Score]:
        """In-flight counts, for information."""
        return plain_scores(query, candidates)
