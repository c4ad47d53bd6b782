"""Deadlines for an answer: an engine that falls silent, a client that does not read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from aiohttp import web

from prefixpool_router.dispatch_types import Dispatch
from prefixpool_router.engine_answer import EngineAnswer
from prefixpool_router.failures import LostError, SilentError, UnansweredError

LOOK_S: Final = 5.0  # between two looks; an engine that is out of reach and silent for so long is given up


class Watchdog:
    """One timer for a whole answer, looked at only when it fires: noting progress costs one clock reading a chunk.

    `give_up` is called when the engine sent nothing for `read_s`, or is lost; `cut_off` when the client took nothing for
    `write_s`. Either may come once.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        *,
        read_s: float,
        write_s: float,
        give_up: Callable[[UnansweredError], None],
        cut_off: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._dispatch = dispatch
        self._read_s, self._write_s = read_s, write_s
        self._give_up, self._cut_off = give_up, cut_off
        self._writing = False
        self._since = self._loop.time()
        # Not later than the shorter of both, because the side that is waited for may change meanwhile.
        self._timer = self._loop.call_later(min(read_s, write_s, LOOK_S), self._look)

    def reading(self) -> None:
        """From now on the engine is waited for."""
        self._writing = False
        self._since = self._loop.time()

    def writing(self) -> None:
        """From now on the client is waited for."""
        self._writing = True
        self._since = self._loop.time()

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        waited_s = self._loop.time() - self._since
        left_s = (self._write_s if self._writing else self._read_s) - waited_s
        if self._writing and left_s <= 0:
            self._cut_off()
        elif left_s <= 0:
            self._give_up(SilentError(f"the engine sent nothing for {self._read_s:g} s"))
        elif not self._writing and waited_s >= LOOK_S and self._dispatch.lost:
            self._give_up(LostError("the engine is out of reach"))
        else:
            self._timer = self._loop.call_later(min(left_s, self._read_s, self._write_s, LOOK_S), self._look)


def watch(dispatch: Dispatch, answer: EngineAnswer, request: web.BaseRequest, *, read_s: float, write_s: float) -> Watchdog:
    """An engine that is silent or lost ends the answer; a client that never reads is cut off, which cancels its handler."""

    def cut_off() -> None:
        if request.transport is not None:
            request.transport.abort()

    return Watchdog(dispatch, read_s=read_s, write_s=write_s, give_up=answer.fail, cut_off=cut_off)


def expect(dispatch: Dispatch, *, silence_s: float, give_up: Callable[[UnansweredError], None]) -> Watchdog:
    """For the time before an answer: there is nothing yet for the client to take."""
    return Watchdog(dispatch, read_s=silence_s, write_s=silence_s, give_up=give_up, cut_off=_never)


def _never() -> None:
    """Nothing is written."""
