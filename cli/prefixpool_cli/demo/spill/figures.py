"""What came from which tier, and what a replica that was killed still served. Pure; keys are those of the report file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from prefixpool_agent.engines.metrics import EngineLoad
from prefixpool_cli.demo.greedy import Difference, GreedyFigures, figures
from prefixpool_cli.demo.ideal import PrefixTree
from prefixpool_cli.demo.samples import Arm, Sample, Tokens


class TierTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens by where they came from, as the engines counted them."""

    device: int = 0
    host: int = 0
    disk: int = 0

    def __add__(self, other: TierTokens) -> TierTokens:
        return TierTokens(device=self.device + other.device, host=self.host + other.host, disk=self.disk + other.disk)

    def __sub__(self, other: TierTokens) -> TierTokens:
        return TierTokens(device=self.device - other.device, host=self.host - other.host, disk=self.disk - other.disk)


class Death(NamedTuple):
    """A replica was killed before request `died`, and served again from request `back` on, `seconds` later."""

    replica: str
    died: int
    back: int
    seconds: float
    disk_tokens: int  # that it read from disk since


class RestartFigures(msgspec.Struct, frozen=True, kw_only=True):
    """First repeats: requests of known sessions that were the first of theirs on the replica since it came back."""

    replica: str
    seconds: float
    requests_meanwhile: int
    hit_rate_meanwhile: float
    first_repeats: int
    cached_tokens: int
    reusable_tokens: int
    predicted_within_one_block: int
    disk_tokens: int


def tier_tokens(loads: Iterable[EngineLoad]) -> TierTokens:
    """Of all engines together, since their starts."""
    seen = list(loads)
    host, disk = sum(load.host_tokens for load in seen), sum(load.disk_tokens for load in seen)
    return TierTokens(device=sum(load.cached_tokens for load in seen) - host - disk, host=host, disk=disk)


def restart_figures(arm: Arm, tokens: Mapping[int, Tokens], block_tokens: int, death: Death) -> RestartFigures:
    """`tokens` by step, for every answered request."""
    meanwhile = [s for s in arm.answered() if death.died <= s.step < death.back]
    repeats = first_repeats(arm, death)
    prompt = sum(s.prompt_tokens for s in meanwhile)
    return RestartFigures(
        replica=death.replica,
        seconds=death.seconds,
        requests_meanwhile=len(meanwhile),
        hit_rate_meanwhile=sum(s.cached_tokens for s in meanwhile) / prompt if prompt else 0.0,
        first_repeats=len(repeats),
        cached_tokens=sum(s.cached_tokens for s in repeats),
        reusable_tokens=sum(_reusable(arm, s, tokens, block_tokens) for s in repeats),
        predicted_within_one_block=sum(abs(s.predicted_tokens - s.cached_tokens) <= block_tokens for s in repeats),
        disk_tokens=death.disk_tokens,
    )


def first_repeats(arm: Arm, death: Death) -> list[Sample]:
    """In the order of their steps."""
    first: dict[int, Sample] = {}
    for sample in sorted(arm.answered(), key=lambda s: s.step):
        if sample.step >= death.back and sample.replica == death.replica and sample.turn:
            first.setdefault(sample.session, sample)
    return list(first.values())


def _reusable(arm: Arm, sample: Sample, tokens: Mapping[int, Tokens], block_tokens: int) -> int:
    """What a pool that keeps everything would have had for a request when it was sent."""
    tree = PrefixTree(block_tokens)
    for other in arm.answered():
        if other.ended_s <= sample.started_s:
            tree.add(tokens[other.step].stored)
    return tree.match(tokens[sample.step].prompt)


def unproven(alone: Arm, others: Sequence[Arm]) -> list[Sample]:
    """Answers with tiers, each once, to which the device alone did not say the same."""
    known = {_said(sample) for sample in alone.answered()}
    left = {_said(sample): sample for arm in others for sample in arm.answered()}
    return [sample for said, sample in left.items() if said not in known]


def greedy_figures(others: Sequence[Arm], differences: Sequence[Difference]) -> GreedyFigures:
    """All answers with tiers were compared; an answer that differs counts once, in however many arms it was given."""
    return figures(sum(len(arm.answered()) for arm in others), differences)


def _said(sample: Sample) -> bytes:
    return msgspec.json.encode((sample.messages, sample.reply))
