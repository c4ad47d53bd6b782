"""Any replica, at random."""

from __future__ import annotations

from prefixpool.policy.base import Candidates, Choice, Query, Reason, Score
from prefixpool.policy.holdings import Holdings, others, plain_scores


class Uniform:
    """The query's draw decides."""

    name = "random"

    def choose(self, query: Query, candidates: Candidates) -> Choice:
        """Pick any replica."""
        members = sorted(candidates, key=lambda member: member.name)
        at = int(query.draw * len(members))
        chosen, rest = members[at], members[at + 1 :] + members[:at]
        predicted = Holdings(query.levels, query.prompt_tokens).predicted(chosen)
        return Choice(chosen.name, Reason.RANDOM, predicted, others((member.name for member in rest), chosen.name))

    def scores(self, query: Query, candidates: Candidates) -> list[Score]:
        """In-flight counts, for information."""
        return plain_scores(query, candidates)
