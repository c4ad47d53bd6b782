"""Routing policies: pure functions from a query and the fleet's numbers to a choice with its reason."""

from prefixpool.policy.base import Candidate, Candidates, Choice, Policy, Query, Reason, Score
from prefixpool.policy.registry import named, policies

__all__ = ["Candidate", "Candidates", "Choice", "Policy", "Query", "Reason", "Score", "named", "policies"]
