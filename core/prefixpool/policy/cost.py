"""What a request costs everybody, in seconds: prefill, loading, eviction, slowdown of decodes (research: algorithms.md 6.2).

Greedy "lowest expected latency" collapses near saturation because it ignores the work it adds for everyone else; the sum
below does not. Rates are measured by agents; what is not measured is filled in so that the ranking stays right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from prefixpool.wire import Costs

DECODE_WEIGHT: Final = 0.05  # a second of slower decoding against a second of waiting (0.03..0.1 in replay)
REUSE: Final = 0.3  # probability that an evicted token would have been wanted again
KAPPA_MAX: Final = 20.0  # work counts at most so many times more in a busy pool than in an idle one
TYPICAL_UNCACHED_TOKENS: Final = 2000
LOAD_SHARE: Final = 0.2  # loading a token from a lower tier against computing it, where not measured
STEP_TOKENS: Final = 100  # a decode step against prefilling one token, where not measured
SEQUENCE_SHARE: Final = 0.02  # one more sequence in a decode step against the step, where not measured


class Rates(NamedTuple):
    """Seconds, complete: nothing in here is unknown."""

    p1: float  # prefill, per token
    p2: float  # prefill, per token squared
    step_s: float  # one decode step
    step_s_per_sequence: float
    output_tokens: float  # mean length of an answer
    host_s_per_token: float = 0.0  # bringing a token back from host memory
    disk_s_per_token: float = 0.0  # from disk, the way through host memory included

    def prefill_s(self, missing: float, cached: float) -> float:
        """`missing` tokens behind `cached` ones."""
        return missing * (self.p1 + self.p2 * (missing + 2 * cached))


DEFAULT_RATES: Final = Rates(
    p1=1e-4,
    p2=0.0,
    step_s=1e-2,
    step_s_per_sequence=2e-4,
    output_tokens=200.0,
    host_s_per_token=LOAD_SHARE * 1e-4,
    disk_s_per_token=LOAD_SHARE * 1e-4,
)


def pool_rates(measured: Sequence[Costs]) -> Rates:
    """Means over those who measured, each figure for itself."""
    p1 = _mean([c.prefill_s_per_token for c in measured]) or DEFAULT_RATES.p1
    step = _mean([c.decode_step_s for c in measured]) or STEP_TOKENS * p1
    host = _mean([c.host_s_per_token for c in measured]) or LOAD_SHARE * p1
    return Rates(
        p1=p1,
        p2=_mean([c.prefill_s_per_token2 for c in measured]),
        step_s=step,
        step_s_per_sequence=_mean([c.decode_step_s_per_sequence for c in measured]) or SEQUENCE_SHARE * step,
        output_tokens=_mean([c.output_tokens for c in measured]) or DEFAULT_RATES.output_tokens,
        host_s_per_token=host,
        disk_s_per_token=_mean([c.disk_s_per_token for c in measured]) or max(host, LOAD_SHARE * p1),
    )


def rates(measured: Costs, pool: Rates) -> Rates:
    """One replica's rates; the pool's where it has not measured. p2 belongs to p1: a measured 0 is a fact."""
    return Rates(
        p1=measured.prefill_s_per_token or pool.p1,
        p2=measured.prefill_s_per_token2 if measured.prefill_s_per_token else pool.p2,
        step_s=measured.decode_step_s or pool.step_s,
        step_s_per_sequence=measured.decode_step_s_per_sequence or pool.step_s_per_sequence,
        output_tokens=measured.output_tokens or pool.output_tokens,
        host_s_per_token=measured.host_s_per_token or pool.host_s_per_token,
        disk_s_per_token=measured.disk_s_per_token or pool.disk_s_per_token,
    )


def kappa(mean_wait_s: float, tau_s: float) -> float:
    """Weight of work in a pool whose replicas have so much queued: about 1 / (1 - utilisation)."""
    return min(1.0 + mean_wait_s / tau_s, KAPPA_MAX)


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if value > 0]
    return sum(known) / len(known) if known else 0.0
