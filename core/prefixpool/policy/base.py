"""What every policy sees and returns. Policies do no I/O, own no clock; randomness comes in with the query."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from prefixpool.levels import Level
from prefixpool.policy.candidates import Candidate, Candidates

__all__ = ["Candidate", "Candidates", "Choice", "Policy", "Query", "Reason", "Score"]


class Reason(StrEnum):
    """Why a replica was chosen: one word for headers, metrics and logs."""

    WARM = "warm"  # cheapest, and it holds part of the prefix
    COLD = "cold"  # nobody holds anything: the ring's place
    COLD_MOVED = "cold_moved"  # the ring's place was above its bound: the next one
    OVERFLOW = "overflow"  # the cheapest holder was above its bound, or another was cheaper despite the miss
    LEAST_LOAD = "least_load"
    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    SESSION = "session"
    FRESH = "fresh"  # a hit elsewhere was given up, so that a new or emptied replica fills
    ONLY = "only"  # one candidate
    NO_CHAIN = "no_chain"  # the request has no prefix chain (embeddings and the like): by load


class Query(NamedTuple):
    """One request, as far as routing cares. `levels`: what the index holds of its prefix, already matched."""

    levels: Sequence[Level]
    prompt_tokens: int  # exact, or estimated but more than the deepest level has; hits are cut to one less
    cold_key: int  # 64-bit hash that places it when it is cold everywhere; 0: no chain
    session_key: int  # 64-bit hash of the client's session, 0: none
    draw: float  # uniform in [0, 1), for breaking near-ties at random
    turn: int  # a counter, for round robin
    cold_tokens: int = 0  # token depth of the boundary behind `cold_key`: hits no deeper leave its place to the ring


class Score(NamedTuple):
    """One candidate's numbers, for `explain`."""

    name: str
    device_tokens: int  # held on the device tier
    host_tokens: int  # behind those, in host memory
    disk_tokens: int  # behind those, on disk
    held_tokens: int  # in any tier: the sum
    cached_tokens: int  # of these, what is not computed: loading the rest would cost more
    load_s: float  # bringing back those of them that are not on the device
    inflight: int
    queue_s: float
    prefill_s: float  # computing the rest of the prompt
    total: float
    gated: bool  # above its bound


class Choice(NamedTuple):
    """One replica."""

    name: str
    reason: Reason
    predicted_tokens: int  # cached tokens expected on it, before flooring to blocks


class Policy(Protocol):
    """Pure but for what it reads from `candidates`, which is never empty."""

    name: str

    def choose(self, query: Query, candidates: Candidates) -> Choice:
        """Pick a replica."""
        ...

    def scores(self, query: Query, candidates: Candidates) -> list[Score]:
        """Every candidate's numbers, as `choose` saw them; slower, for `explain`."""
        ...
