"""Deadlines for a stream: an engine that falls silent, a client that does not read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from prefixpool_router.engine_answer import EngineAnswer
from prefixpool_router.failures import SilentError


class Watchdog:
    """One timer for a whole stream, looked at only when it fires: noting progress costs one clock reading a chunk."""

    def __init__(
        self, *, read_s: float, write_s: float, on_silent: Callable[[], None], on_stuck: Callable[[], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._read_s, self._write_s = read_s, write_s
        self._on_silent, self._on_stuck = on_silent, on_stuck
        self._writing = False
        self._since = self._loop.time()
        self._timer = self._loop.call_later(min(read_s, write_s), self._look)

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
        left = self._since + (self._write_s if self._writing else self._read_s) - self._loop.time()
        if left > 0:
            # Not later than the shorter of both, because the side that is waited for may change meanwhile.
            self._timer = self._loop.call_later(min(left, self._read_s, self._write_s), self._look)
        elif self._writing:
            self._on_stuck()
        else:
            self._on_silent()


def watch(answer: EngineAnswer, request: web.BaseRequest, *, read_s: float, write_s: float) -> Watchdog:
    """A silent engine ends the answer with SilentError; a client that never reads is cut off, which cancels its handler."""

    def on_silent() -> None:
        answer.fail(SilentError(f"the engine sent nothing for {read_s:g} s"))

    def on_stuck() -> None:
        if request.transport is not None:
            request.transport.abort()

    return Watchdog(read_s=read_s, write_s=write_s, on_silent=on_silent, on_stuck=on_stuck)
