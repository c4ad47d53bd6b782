"""Are the pool's greedy answers those of one engine alone? (design: 11)

Equal, or differing first where the two best tokens are within 0.05 in log-probability: another split of the prompt changes
the rounding of bf16, and a near-tie may then fall the other way. Prompts are those that the pool got, so that one tie does
not spread through a conversation.
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
NEVER: Final = -1e9  # log-probability of a token that is not there


class GreedyFigures(msgspec.Struct, frozen=True, kw_only=True):
    """`wrong` must be 0. `steps_wrong` names the requests."""

    compared: int
    equal: int
    near_ties: int
    wrong: int
    steps_wrong: tuple[int, ...] = ()


class Token(msgspec.Struct, frozen=True):
    """One token that an engine chose, and the log-probabilities of the two best."""

    text: bytes
    best: float
    second: float


async def compare(client: ChatClient, arm: Arm, workload: Workload, concurrency: int, done: Done) -> GreedyFigures:
    """Replay an arm's prompts on one engine; session by session, so that its cache is of use. Raises RequestFailedError."""
    queue = iter(sorted(arm.answered(), key=lambda s: (s.session, s.turn)))
    verdicts: dict[int, str] = {}

    async def work() -> None:
        for sample in queue:
            limit = workload.sessions[sample.session].turns[sample.turn].max_tokens
            alone = await answered(client, sample, limit)
            if alone.error:
                raise RequestFailedError(f"request {sample.step} on one engine: {alone.error}")
            verdicts[sample.step] = await _verdict(client, sample, alone, limit)
            done(alone)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    words = list(verdicts.values())
    return GreedyFigures(
        compared=len(words),
        equal=words.count("equal"),
        near_ties=words.count("tie"),
        wrong=words.count("wrong"),
        steps_wrong=tuple(sorted(step for step, word in verdicts.items() if word == "wrong")),
    )


async def _verdict(client: ChatClient, pool: Sample, alone: Sample, max_tokens: int) -> str:
    if pool.reply == alone.reply:
        return "equal"
    body = {"messages": pool.messages, "max_tokens": max_tokens, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    tokens = chosen_tokens(await client.post(CHAT, body))
    return "tie" if is_near_tie(pool.reply.encode(), tokens) else "wrong"


def is_near_tie(reply: bytes, alone: Sequence[Token]) -> bool:
    """Whether `reply` leaves the tokens of the engine alone at a place where its two best were within TIE."""
    text = b""
    for token in alone:
        if not reply.startswith(text + token.text):
            return token.best - token.second <= TIE
        text += token.text
    # Asked again, the engine alone may write what the pool wrote: it wavers itself. More than all its tokens is wrong.
    return reply == text


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
