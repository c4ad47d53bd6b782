"""Figures of arms and of predictions, from samples. Pure; keys are those of the report file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from prefixpool_cli.demo.ideal import infinite_cache, lost_to_eviction
from prefixpool_cli.demo.samples import Arm, Tokens

MIN_BLOCKS: Final = 8  # predictions are judged on requests with so many blocks predicted or actual


class ArmFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One arm. Rates are fractions of prompt tokens; times in seconds."""

    requests: int
    errors: int
    hit_rate: float
    ideal_hit_rate: float
    ttft_p50_s: float
    ttft_p95_s: float
    requests_per_s: float
    wall_s: float
    prompt_tokens: int
    computed_tokens: int
    working_set_tokens: int
    reasons: dict[str, int]
    by_replica: dict[str, int]


class PredictionFigures(msgspec.Struct, frozen=True, kw_only=True):
    """How true predictions were; over = more predicted than was really cached."""

    requests: int
    evicted_fraction: float
    within_one_block_fraction: float
    over_predicted_fraction: float
    error_tokens_p50: float
    error_tokens_p95: float
    error_fraction_p95: float


class Judged(NamedTuple):
    """One request's prediction, in tokens."""

    predicted: int
    actual: int
    prompt: int
    lost: int


def quantile(values: Iterable[float], q: float) -> float:
    """Linear interpolation between the two nearest ranks; 0 for no values."""
    ranked = sorted(values)
    if not ranked:
        return 0.0
    at = q * (len(ranked) - 1)
    low = int(at)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (at - low)


def arm_figures(arm: Arm, tokens: Mapping[int, Tokens], block_tokens: int) -> ArmFigures:
    """`tokens` by step, for every answered request."""
    answered = arm.answered()
    ideal, working_set = infinite_cache(arm, tokens, block_tokens)
    prompt = sum(s.prompt_tokens for s in answered)
    cached = sum(s.cached_tokens for s in answered)
    wall_s = arm.ended_s - arm.started_s
    times = [s.ttft_s for s in answered if s.first_s]
    return ArmFigures(
        requests=len(arm.samples),
        errors=len(arm.samples) - len(answered),
        hit_rate=cached / prompt if prompt else 0.0,
        ideal_hit_rate=ideal,
        ttft_p50_s=quantile(times, 0.5),
        ttft_p95_s=quantile(times, 0.95),
        requests_per_s=len(answered) / wall_s if wall_s > 0 else 0.0,
        wall_s=wall_s,
        prompt_tokens=prompt,
        computed_tokens=prompt - cached,
        working_set_tokens=working_set,
        reasons=_count(s.reason for s in answered),
        by_replica=_count(s.replica for s in answered),
    )


def judged(arm: Arm, tokens: Mapping[int, Tokens], block_tokens: int) -> list[Judged]:
    """The requests whose predictions count."""
    lost = lost_to_eviction(arm, tokens, block_tokens)
    least = MIN_BLOCKS * block_tokens
    return [
        Judged(s.predicted_tokens, s.cached_tokens, s.prompt_tokens, lost[s.step])
        for s in arm.answered()
        if max(s.predicted_tokens, s.cached_tokens) >= least
    ]


def prediction_figures(requests: Sequence[Judged], block_tokens: int) -> PredictionFigures:
    """All zero for no requests."""
    count = max(1, len(requests))
    errors = [abs(r.predicted - r.actual) for r in requests]
    return PredictionFigures(
        requests=len(requests),
        evicted_fraction=sum(r.lost >= block_tokens for r in requests) / count,
        within_one_block_fraction=sum(e <= block_tokens for e in errors) / count,
        over_predicted_fraction=sum(r.predicted - r.actual > block_tokens for r in requests) / count,
        error_tokens_p50=quantile(errors, 0.5),
        error_tokens_p95=quantile(errors, 0.95),
        error_fraction_p95=quantile([e / r.prompt for e, r in zip(errors, requests, strict=True) if r.prompt], 0.95),
    )


def _count(words: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    return dict(sorted(counts.items()))
