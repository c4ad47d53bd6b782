"""The sim's scheduler, driven step by step, without a clock."""

from __future__ import annotations

from typing import Any

from prefixpool_agent.sim.disk import DiskTier
from prefixpool_agent.sim.scheduler import Scheduler, SchedulerConfig, Step
from prefixpool_agent.sim.sequence import Limits, Scope, Sequence
from prefixpool_agent.sim.tokenizer import SimTokenizer

SIZE = 4
CONFIG = SchedulerConfig(blocks=65, block_tokens=SIZE, max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64)


def prompt(first: int, length: int) -> list[int]:
    return list(range(first * 1000, first * 1000 + length))


def sequence(tokens: list[int], max_tokens: int = 1, *, scope: Scope | None = None, **limits: Any) -> Sequence:
    limit = Limits(max_tokens=max_tokens, **{"ignore_eos": True, **limits})
    return Sequence(tokens, limit, scope or Scope(), block_tokens=SIZE)


class Engine:
    """A scheduler and everything that it announced."""

    def __init__(self, disk: DiskTier | None = None, **changes: int) -> None:
        self.scheduler = Scheduler(CONFIG._replace(**changes), SimTokenizer(), disk)
        self.batches: list[list[dict[str, Any]]] = []

    def step(self) -> Step:
        step = self.scheduler.schedule()
        self.scheduler.execute(step)
        self.scheduler.sample(step)
        self.batches.append(self.scheduler.take_events())
        return step

    def run(self, *sequences: Sequence) -> list[Step]:
        for item in sequences:
            self.scheduler.add(item)
        steps = []
        while self.scheduler.busy:
            steps.append(self.step())
            assert len(steps) < 5000
        return steps

    def events(self, kind: str, medium: str = "GPU") -> list[dict[str, Any]]:
        return [e for batch in self.batches for e in batch if e["type"] == kind and e.get("medium") == medium]


def reply(item: Sequence) -> list[int]:
    return item.tokens[item.prompt_tokens :]
