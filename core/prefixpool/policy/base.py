"""What every policy sees and returns. Policies do no I/O, own no clock; randomness comes in with the query."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from prefixpool.index import Level


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
    ONLY = "only"  # one candidate
    NO_CHAIN = "no_chain"  # the request has no prefix chain (embeddings and the like): by load


class Query(NamedTuple):
    """One request, as far as routing cares. `levels`: what the index holds of its prefix, already matched."""

    levels: Sequence[Level]
    prompt_tokens: int  # exact or estimated
    cold_key: int  # 64-bit hash that places it when it is cold everywhere; 0: no chain
    session_key: int  # 64-bit hash of the client's session, 0: none
    draw: float  # uniform in [0, 1), for breaking near-ties at random
    turn: int  # a counter, for round robin


class Candidate:
    """One replica that may take the request; mutated by its owner when loads or costs change, read by policies.

    Slotted and shared on purpose: 64 of them are read per decision.
    """

    __slots__ = (
        "bit",
        "costs_p1",
        "costs_p2",
        "decode_step_s",
        "decode_step_s_per_sequence",
        "device_tokens",
        "inflight",
        "load_s_per_token",
        "name",
        "output_tokens",
        "pending_tokens",
        "seed",
        "trust",
    )

    def __init__(self, name: str, seed: int, bit: int) -> None:
        self.name = name
        self.seed = seed  # 64-bit hash of the name, for rendezvous
        self.bit = bit  # 1 << 3 * index column; 0: holds nothing that we know of
        self.inflight = 0  # all routers together: the agent's count plus own dispatches it has not reported yet
        self.pending_tokens = 0  # uncached prompt tokens dispatched and not yet prefilled
        self.device_tokens = 0  # capacity; 0 = unknown
        self.costs_p1 = 0.0  # see wire.Costs; 0 = not measured: the pool's mean, else a default, filled in by the owner
        self.costs_p2 = 0.0
        self.decode_step_s = 0.0
        self.decode_step_s_per_sequence = 0.0
        self.output_tokens = 0.0
        self.load_s_per_token = 0.0  # bringing a token back from the tier below; 0 = no tier below
        self.trust = 1.0  # 0..1: how far predictions for this replica are believed (closed loop)


class Score(NamedTuple):
    """One candidate's numbers, for `explain`."""

    name: str
    device_tokens: int  # predicted on the device tier
    held_tokens: int  # predicted in any tier
    inflight: int
    queue_s: float
    prefill_s: float
    total: float
    gated: bool  # above its bound


class Choice(NamedTuple):
    """The chosen replica first, then the order in which to try others if it refuses."""

    name: str
    reason: Reason
    predicted_tokens: int  # cached tokens expected on it, before flooring to blocks
    fallback: tuple[str, ...] = ()


class Policy(Protocol):
    """`candidates` is never empty. `explain=True` also returns every candidate's numbers (slower)."""

    name: str

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        """Pick a replica."""
        ...

    def scores(self, query: Query, candidates: Sequence[Candidate]) -> list[Score]:
        """Every candidate's numbers, as `choose` saw them."""
        ...
