"""Where requests wait while every replica has as many as it takes, or while a router that has just started knows none yet.

Engines would queue them, too, but each for itself: a place that becomes free elsewhere, or where the prompt is cached, would
come too late for what waits in the wrong queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import islice
from typing import Final, TypeVar

from prefixpool.errors import RequestError
from prefixpool_router.dispatch_types import NotYetError

_RETRY_AFTER_S: Final = 1

T = TypeVar("T")


class WaitingRoom:
    """At most `most` requests, each until its deadline. Those of one kind are served in order of arrival."""

    def __init__(self, *, most: int) -> None:
        self._most = most
        self._kinds: dict[str, dict[asyncio.Event, None]] = {}  # of each kind the turns, the longest waiting first

    @property
    def waiting(self) -> int:
        return sum(map(len, self._kinds.values()))

    def wake(self, places: int) -> None:
        """Let so many requests of each kind try again."""
        for turns in self._kinds.values():
            for turn in islice((turn for turn in turns if not turn.is_set()), places):
                turn.set()

    async def until(self, attempt: Callable[[], T], *, kind: str, deadline_s: float) -> T:
        """The first result of `attempt`, tried at each waking until it raises no NotYetError. `deadline_s`: loop time.

        Raises RequestError 429 at the deadline, or at once if too many wait already; and what else `attempt` raises.
        """
        if self.waiting >= self._most:
            raise _too_many("Every replica is full, and so is the queue.")
        turn = asyncio.Event()
        self._kinds.setdefault(kind, {})[turn] = None
        try:
            async with asyncio.timeout_at(deadline_s):
                return await _tried(turn, attempt)
        except TimeoutError:
            raise _too_many("Every replica is full; none had room in time.") from None
        finally:
            self._leave(turn, kind)

    def _leave(self, turn: asyncio.Event, kind: str) -> None:
        turns = self._kinds[kind]
        del turns[turn]
        if not turns:
            del self._kinds[kind]
        if turn.is_set():  # woken, and gone before it tried: the place is the next one's
            self.wake(1)


async def _tried(turn: asyncio.Event, attempt: Callable[[], T]) -> T:
    while True:
        await turn.wait()
        turn.clear()
        try:
            return attempt()
        except NotYetError:
            continue  # somebody was faster


def _too_many(message: str) -> RequestError:
    return RequestError(429, message, retry_after_s=_RETRY_AFTER_S)
