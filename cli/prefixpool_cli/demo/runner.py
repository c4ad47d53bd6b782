"""Sends a workload through a pool: a fixed number of requests in flight, each conversation in its own order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

import msgspec

from prefixpool import names
from prefixpool_cli.demo.client import Answer, ChatClient, RequestFailedError
from prefixpool_cli.demo.samples import Arm, Sample
from prefixpool_cli.demo.workload import Message, Workload, messages


class ArmPlan(NamedTuple):
    """How one arm routes. `agents`: whether the router knows residency from agents."""

    name: str
    policy: str
    agents: bool = True


Done = Callable[[Sample], None]


class Run:
    """One pass of a workload, at once or in parts. Single use; owns its tasks."""

    def __init__(self, client: ChatClient, workload: Workload, done: Done) -> None:
        self._client = client
        self._workload = workload
        self._done = done
        self._replies: list[list[str]] = [[] for _ in workload.sessions]
        self._over = [[asyncio.Event() for _ in session.turns] for session in workload.sessions]
        self._samples: list[Sample] = []
        self._steps = iter(enumerate(workload.steps()))

    async def all(self, concurrency: int, at_most: int | None = None) -> tuple[Sample, ...]:
        """Every request, or the next so many; what there is so far, by step.

        Failed ones are samples with an error; nothing is raised for them.
        """
        steps = islice(self._steps, at_most)
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(self._work(steps))
        return tuple(sorted(self._samples, key=lambda s: s.step))

    async def _work(self, steps: Iterator[tuple[int, tuple[int, int]]]) -> None:
        for step, (session, turn) in steps:
            if turn:
                await self._over[session][turn - 1].wait()
            sample = await self._one(step, session, turn)
            self._samples.append(sample)
            self._replies[session].append(sample.reply)
            self._over[session][turn].set()
            self._done(sample)

    async def _one(self, step: int, number: int, turn: int) -> Sample:
        session = self._workload.sessions[number]
        sent = messages(session, turn, self._replies[number])
        sample = Sample(
            step=step, session=number, turn=turn, kind=session.kind, started_s=time.monotonic(), messages=tuple(sent)
        )
        return await answered(self._client, sample, session.turns[turn].max_tokens)


async def answered(client: ChatClient, sample: Sample, max_tokens: int) -> Sample:
    """Send what the sample holds, from now on; the sample with what came back."""
    sent: list[Message] = list(sample.messages)
    started_s = time.monotonic()
    try:
        answer = await client.ask(sent, max_tokens)
    except RequestFailedError as error:
        return msgspec.structs.replace(sample, started_s=started_s, ended_s=time.monotonic(), error=str(error))
    return msgspec.structs.replace(
        sample,
        started_s=started_s,
        first_s=answer.first_s,
        ended_s=answer.ended_s,
        request_id=answer.headers[names.H_REQUEST_ID],
        replica=answer.headers[names.H_REPLICA],
        reason=answer.headers[names.H_REASON],
        predicted_tokens=_predicted(answer),
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        output_tokens=answer.output_tokens,
        finish=answer.finish,
        reply=answer.text,
    )


async def run_arm(client: ChatClient, workload: Workload, plan: ArmPlan, concurrency: int, done: Done) -> Arm:
    """One arm from its first request to its last answer."""
    started_s = time.monotonic()
    samples = await Run(client, workload, done).all(concurrency)
    return Arm(
        name=plan.name,
        policy=plan.policy,
        precise=plan.agents,
        started_s=started_s,
        ended_s=time.monotonic(),
        samples=samples,
    )


def _predicted(answer: Answer) -> int:
    raw = answer.headers[names.H_PREDICTED]
    return int(raw) if raw.isdigit() else 0
