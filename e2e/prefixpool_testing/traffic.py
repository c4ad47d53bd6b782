"""What clients do to a pool while something happens to it: steady requests, streams that stay open, and what became of each.

async with traffic(clients_of(pool)) as seen:
    await seen.more(20)
    ...                                  # kill something
    await seen.more(50)
assert not seen.failures
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any, Final

import aiohttp

from prefixpool_testing.eventually import eventually
from prefixpool_testing.pool_client import CHAT, PoolClient, Reply, Stream, chat
from prefixpool_testing.sim_pool import SimPool, text

LANES: Final = 6
PROMPTS: Final = 12  # that repeat, so that each answer can be compared with the one before
_RECONNECTS: Final = 5

# No byte of an answer came: any client may ask again.
_RECONNECT: Final = (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)


def clients_of(pool: SimPool) -> list[PoolClient]:
    """One client of each router."""
    return [pool.client_of("alpha", router) for router in range(len(pool.local.routers))]


class Traffic:
    """What came of the requests so far. `failures`: in words, one for each answer that was not whole and right."""

    def __init__(self, clients: Sequence[PoolClient], name: str, options: dict[str, Any]) -> None:
        self.failures: list[str] = []
        self.replies: list[Reply] = []
        self.reconnects = 0
        self.stopped = False
        self._clients = clients
        self._name = name
        self._options = options
        self._answers: dict[str, str] = {}
        self._lanes: set[int] = set()
        self._turns: Counter[int] = Counter()  # ended, by lane

    @property
    def served(self) -> Counter[str]:
        """Whole and right answers by replica."""
        return Counter(reply.replica for reply in self.replies)

    async def more(self, requests: int) -> None:
        """Until so many more were answered. Raises AssertionError if they are not."""
        wanted = len(self.replies) + len(self.failures) + requests

        async def check() -> bool:
            return len(self.replies) + len(self.failures) >= wanted

        await eventually(check, within_s=60.0, what=f"{requests} more answers")

    async def each_lane(self) -> None:
        """Until nothing is on its way that was when this was called. Raises AssertionError if that takes too long."""
        before = Counter(self._turns)

        async def check() -> bool:
            return all(self._turns[lane] > before[lane] for lane in self._lanes)

        await eventually(check, within_s=60.0, what="an answer in each lane")

    async def lane(self, number: int) -> None:
        """One request after the other, until `stopped`."""
        draw = Random(f"{self._name}{number}")
        turn = number
        self._lanes.add(number)
        while not self.stopped:
            said = text(f"{self._name} {draw.randrange(PROMPTS)}", 60)
            try:
                reply = await self._ask(said, turn)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self.failures.append(f"no answer: {error!r}")
            else:
                self._judge(said, reply)
            self._turns[number] += 1
            turn += 1

    async def _ask(self, said: str, turn: int) -> Reply:
        for _ in range(_RECONNECTS):
            turn += 1
            try:
                return await self._clients[turn % len(self._clients)].post(CHAT, chat(said, **self._options))
            except _RECONNECT:
                self.reconnects += 1
                if len(self._clients) == 1:
                    raise
                await asyncio.sleep(0.02)
        raise aiohttp.ClientConnectionError("no router answers")

    def _judge(self, said: str, reply: Reply) -> None:
        if reply.status != 200:
            self.failures.append(f"{reply.status} {reply.body[:200]!r}")
        elif self._answers.setdefault(said, reply.text) != reply.text:
            self.failures.append(f"another answer than before from {reply.replica}")
        else:
            self.replies.append(reply)


@asynccontextmanager
async def traffic(
    clients: Sequence[PoolClient], *, lanes: int = LANES, name: str = "traffic", **options: Any
) -> AsyncIterator[Traffic]:
    """Short greedy chats, so many at a time, in turns over the clients; one that is not reached is left for the next.

    Requests that are under way at the end of the block are waited for: they count.
    """
    seen = Traffic(clients, name, options)
    tasks = [asyncio.create_task(seen.lane(number)) for number in range(lanes)]
    try:
        yield seen
    finally:
        seen.stopped = True
        await asyncio.gather(*tasks)


@asynccontextmanager
async def streams(
    clients: Sequence[PoolClient], said: Sequence[str], *, tokens: int, at_once: int = 16, **options: Any
) -> AsyncIterator[list[Stream]]:
    """One stream for each text, in turns over the clients, each of exactly so many tokens; all have begun.

    Those that still run at the end of the block are aborted.
    """
    async with AsyncExitStack() as stack:
        turns = asyncio.Semaphore(at_once)

        async def begin(number: int, one: str) -> Stream:
            body = chat(one, **{"max_tokens": tokens, "min_tokens": tokens, **options})
            async with turns:
                stream = await stack.enter_async_context(clients[number % len(clients)].stream(CHAT, body))
                await stream.begin()
            return stream

        yield list(await asyncio.gather(*(begin(number, one) for number, one in enumerate(said))))
