"""What came from which tier, and what a replica that was killed still served. Pure; keys are those of the report file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from prefixpool_agent.engines.metrics import EngineLoad
from prefixpool_cli.demo.greedy import Difference, GreedyFigures, figures
from prefixpool_cli.demo.samples import Arm, Sample


class TierTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens by where they came from, as the engines counted them."""

    device: int = 0
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        """All that was not computed."""
        return self.device + self.host + self.disk

    def __add__(self, other: TierTokens) -> TierTokens:
        return TierTokens(device=self.device + other.device, host=self.host + other.host, disk=self.disk + other.disk)

    def __sub__(self, other: TierTokens) -> TierTokens:
        return TierTokens(device=self.device - other.device, host=self.host - other.host, disk=self.disk - other.disk)


class Repeat(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt from before the death, sent again to the replica that came back. `reusable_tokens`: its whole blocks.

    `expected`: what the router predicted, by tier; `found`: as the engine counted.
    """

    step: int
    prompt_tokens: int
    reusable_tokens: int
    expected: TierTokens
    found: TierTokens

    def predicted_within(self, tokens: int) -> bool:
        """By the totals."""
        return abs(self.expected.total - self.found.total) <= tokens


class Death(NamedTuple):
    """A replica was killed before request `died`, and served again from request `back` on, `seconds` later."""

    replica: str
    died: int
    back: int
    seconds: float
    repeats: tuple[Repeat, ...]  # one after the other, with nothing else in flight


class RestartFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens are sums over the repeats."""

    replica: str
    seconds: float
    requests_meanwhile: int
    hit_rate_meanwhile: float
    first_repeats: int
    cached_tokens: int
    reusable_tokens: int
    predicted_within_one_block: int
    disk_tokens: int
    repeats: tuple[Repeat, ...]


def tier_tokens(loads: Iterable[EngineLoad]) -> TierTokens:
    """Of all engines together, since their starts."""
    seen = list(loads)
    host, disk = sum(load.host_tokens for load in seen), sum(load.disk_tokens for load in seen)
    return TierTokens(device=sum(load.cached_tokens for load in seen) - host - disk, host=host, disk=disk)


def restart_figures(arm: Arm, block_tokens: int, death: Death) -> RestartFigures:
    """`arm`: its requests of the workload, without the repeats."""
    meanwhile = [s for s in arm.answered() if death.died <= s.step < death.back]
    prompt, repeats = sum(s.prompt_tokens for s in meanwhile), death.repeats
    return RestartFigures(
        replica=death.replica,
        seconds=death.seconds,
        requests_meanwhile=len(meanwhile),
        hit_rate_meanwhile=sum(s.cached_tokens for s in meanwhile) / prompt if prompt else 0.0,
        first_repeats=len(repeats),
        cached_tokens=sum(each.found.total for each in repeats),
        reusable_tokens=sum(each.reusable_tokens for each in repeats),
        predicted_within_one_block=sum(each.predicted_within(block_tokens) for each in repeats),
        disk_tokens=sum(each.found.disk for each in repeats),
        repeats=repeats,
    )


def old_requests(samples: Iterable[Sample], replica: str, most: int) -> list[Sample]:
    """The first requests that a replica answered, of different sessions."""
    first: dict[int, Sample] = {}
    for sample in sorted(samples, key=lambda s: s.step):
        if sample.replica == replica and not sample.error:
            first.setdefault(sample.session, sample)
    return list(first.values())[:most]


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
