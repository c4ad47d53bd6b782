"""The client's session decides: all its requests go to one replica, as long as that is within its bound."""

from __future__ import annotations

from prefixpool.policy.base import Candidates, Choice, Query, Reason, Score
from prefixpool.policy.chwbl import BoundedHash, placed


class Session:
    """Without a session the cold key takes its place, and without that the load."""

    name = "session"

    def __init__(self) -> None:
        self._without = BoundedHash()

    def choose(self, query: Query, candidates: Candidates) -> Choice:
        """Pick the session's place."""
        if not query.session_key:
            return self._without.choose(query, candidates)
        return placed(query, candidates, query.session_key, Reason.SESSION)

    def scores(self, query: Query, candidates: Candidates) -> list[Score]:
        """In-flight counts, and who is at its bound."""
        return self._without.scores(query, candidates)
