"""Are the pool's greedy answers those of one engine alone? (design: 11)

Equal, or differing first where the two best tokens are within 0.05 in log-probability: another split of the prompt, or
other company in a batch, changes the rounding, and a near-tie may then fall the other way. Whatever is further apart is
wrong. The demo's engines compute in float32 (command.DTYPE), where rounding is far below that.
Prompts are those that the pool got, so that one tie does not spread through a conversation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from prefixpool_cli.demo.client import CHAT, ChatClient, RequestFailedError
from prefixpool_cli.demo.runner import Done, answered
from prefixpool_cli.demo.samples import Arm, Sample
from prefixpool_cli.demo.workload import Workload

TIE: Final = 0.05
UNKNOWN: Final = -1.0
NEVER: Final = -1e9  # log-probability of a token that is not there


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Two answers to one prompt. `gap`: between the two best tokens where they part, in log-probability; -1: unknown."""

    step: int
    pool: str
    alone: str
    gap: float

    @property
    def is_tie(self) -> bool:
        return 0 <= self.gap <= TIE


class GreedyFigures(msgspec.Struct, frozen=True, kw_only=True):
    """`wrong` must be 0. `steps_wrong` names the requests."""

    compared: int
    equal: int
    near_ties: int
    wrong: int
    steps_wrong: tuple[int, ...] = ()
    differences: tuple[Difference, ...] = ()


class Token(msgspec.Struct, frozen=True):
    """One token that an engine chose, and the log-probabilities of the two best."""

    text: bytes
    best: float
    second: float


async def compare(client: ChatClient, arm: Arm, workload: Workload, concurrency: int, done: Done) -> GreedyFigures:
    """Replay an arm's prompts on one engine; session by session, so that its cache is of use. Raises RequestFailedError."""
    queue = iter(sorted(arm.answered(), key=lambda s: (s.session, s.turn)))
    differ: list[tuple[Sample, Sample]] = []

    async def work() -> None:
        for sample in queue:
            limit = workload.sessions[sample.session].turns[sample.turn].max_tokens
            alone = await answered(client, sample, limit)
            if alone.error:
                raise RequestFailedError(f"request {sample.step} on one engine: {alone.error}")
            if sample.reply != alone.reply:
                differ.append((sample, alone))
            done(alone)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    # One by one: now nothing else is in the engine's batch.
    gaps = [await _gap(client, pool, workload.sessions[pool.session].turns[pool.turn].max_tokens) for pool, _ in differ]
    return figures(
        len(arm.answered()),
        [Difference(step=p.step, pool=p.reply, alone=a.reply, gap=gap) for (p, a), gap in zip(differ, gaps, strict=True)],
    )


def figures(compared: int, differences: Sequence[Difference]) -> GreedyFigures:
    """Counts."""
    wrong = tuple(sorted(each.step for each in differences if not each.is_tie))
    return GreedyFigures(
        compared=compared,
        equal=compared - len(differences),
        near_ties=len(differences) - len(wrong),
        wrong=len(wrong),
        steps_wrong=wrong,
        differences=tuple(sorted(differences, key=lambda each: each.step)),
    )


async def _gap(client: ChatClient, pool: Sample, max_tokens: int) -> float:
    body = {"messages": pool.messages, "max_tokens": max_tokens, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    return gap_at_difference(pool.reply.encode(), chosen_tokens(await client.post(CHAT, body)))


def gap_at_difference(reply: bytes, alone: Sequence[Token]) -> float:
    """Between the engine's two best tokens where `reply` leaves what it wrote; 0: it does not; UNKNOWN: it is longer."""
    text = b""
    for token in alone:
        if not reply.startswith(text + token.text):
            return token.best - token.second
        text += token.text
    return 0.0 if reply == text else UNKNOWN


def chosen_tokens(answer: Any) -> list[Token]:
    """From a chat completion with `logprobs`. Raises RequestFailedError if they are missing."""
    try:
        content = answer["choices"][0]["logprobs"]["content"]
        return [_token(entry) for entry in content]
    except (KeyError, IndexError, TypeError) as error:
        raise RequestFailedError("the engine gives no log-probabilities, so a difference cannot be judged") from error


def _token(entry: dict[str, Any]) -> Token:
    raw = entry.get("bytes")
    text = bytes(raw) if raw is not None else str(entry["token"]).encode()
    best, second, *_ = *sorted((top["logprob"] for top in entry["top_logprobs"]), reverse=True), NEVER, NEVER
    return Token(text, best, second)
