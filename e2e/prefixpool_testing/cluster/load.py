"""Steady load on a pool while accidents happen to it: short chats and streams, and when those that are not whole ended."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Final, NamedTuple

import aiohttp

from prefixpool_testing.pool_client import CHAT, PoolClient, Reply, Stream, chat
from prefixpool_testing.sim_pool import text

CHATS: Final = 4  # lanes
STREAMS: Final = 4
PROMPTS: Final = 12  # that repeat, so that each answer can be compared with the one before
STREAM_TOKENS: Final = 200
GIVE_UP_S: Final = 20.0  # a client whose router is out of reach
_AGAIN_S: Final = 0.1
_APART: Final = {"connection": "close"}  # each request on a connection of its own, so that all routers get some

LOST: Final = "lost"  # the connection to the router broke, or nothing came
ERROR_EVENT: Final = "error event"  # a stream's own end, when its engine is gone
WHOLE: Final = "whole"

_BROKEN: Final = (aiohttp.ClientError, TimeoutError, OSError)


class End(NamedTuple):
    """How a request ended that was not whole, and when it was under way (loop time)."""

    how: str
    began_s: float
    ended_s: float
    what: str


class Load:
    """What came of it so far. `wrong`: answers that no accident excuses, in words."""

    def __init__(self, client: PoolClient, name: str) -> None:
        self.chats: Counter[str] = Counter()
        self.streams: Counter[str] = Counter()
        self.ends: list[End] = []
        self.wrong: list[str] = []
        self.stopped = False
        self._client = client
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._answers: dict[str, str] = {}
        self._halves: list[tuple[str, str]] = []

    async def chat_lane(self, number: int) -> None:
        """One after the other, until `stopped`."""
        draw = Random(f"{self._name} {number}")
        while not self.stopped:
            said, began_s = text(f"{self._name} {draw.randrange(PROMPTS)}", 60), self._loop.time()
            try:
                async with asyncio.timeout(GIVE_UP_S):
                    reply = await self._client.post(CHAT, chat(said), **_APART)
            except _BROKEN as error:
                self.chats[LOST] += 1
                await self._went_wrong(LOST, began_s, f"chat: {error!r}")
            else:
                self._judge(said, reply)

    async def stream_lane(self, number: int) -> None:
        """One after the other, until `stopped`."""
        draw = Random(f"{self._name} stream {number}")
        while not self.stopped:
            said, began_s = text(f"{self._name} stream {draw.randrange(PROMPTS)}", 30), self._loop.time()
            how, what = LOST, "stream: "
            try:
                async with asyncio.timeout(GIVE_UP_S + STREAM_TOKENS / 10):
                    async with self._client.stream(CHAT, _long(said), **_APART) as stream:
                        await stream.rest()
                how, what = self._judge_stream(said, stream)
            except _BROKEN as error:
                what += repr(error)
            self.streams[how] += 1
            if how != WHOLE:
                await self._went_wrong(how, began_s, what)

    def settle(self) -> None:
        """At the end: streams that ended early wrote what the whole ones wrote, as far as they came."""
        for said, written in self._halves:
            if not self._answers.get(said, written).startswith(written):
                self.wrong.append(f"another beginning than the whole answer has: {written[-80:]!r}")

    def _judge(self, said: str, reply: Reply) -> None:
        if reply.status != 200:
            self.wrong.append(f"chat: {reply.status} {reply.body[:200]!r}")
        elif self._same(said, reply.text):
            self.chats[WHOLE] += 1

    def _judge_stream(self, said: str, stream: Stream) -> tuple[str, str]:
        if stream.status != 200:
            self.wrong.append(f"stream: {stream.status}")
        elif stream.done and not stream.errors:
            self._same(said, stream.text)
            return WHOLE, ""
        self._halves.append((said, stream.text))
        return (ERROR_EVENT, str(stream.errors[0])) if stream.errors else (LOST, f"stream: cut {stream.cut}")

    def _same(self, said: str, written: str) -> bool:
        same = self._answers.setdefault(said, written) == written
        if not same:
            self.wrong.append(f"another answer than before: {written[-80:]!r}")
        return same

    async def _went_wrong(self, how: str, began_s: float, what: str) -> None:
        self.ends.append(End(how, began_s, self._loop.time(), what))
        await asyncio.sleep(_AGAIN_S)


def _long(said: str) -> dict[str, object]:
    return chat(said, max_tokens=STREAM_TOKENS, min_tokens=STREAM_TOKENS)


@asynccontextmanager
async def load(client: PoolClient, name: str) -> AsyncIterator[Load]:
    """Requests that are under way at the end of the block are waited for: they count."""
    seen = Load(client, name)
    tasks = [asyncio.create_task(seen.chat_lane(number)) for number in range(CHATS)]
    tasks += [asyncio.create_task(seen.stream_lane(number)) for number in range(STREAMS)]
    try:
        yield seen
    finally:
        seen.stopped = True
        await asyncio.gather(*tasks)
        seen.settle()
