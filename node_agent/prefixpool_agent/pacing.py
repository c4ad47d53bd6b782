"""Gives the event loop back during long runs of small steps (a replay of 10,000 batches, a ring of 4,096 notes)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

SLICE_S: Final = 0.005  # a heartbeat or a load message waits at most this long behind such a run


class Pace:
    """Call `breathe()` after each step: it costs a clock reading, and yields once a slice is used up.

    Awaiting a socket that already holds data does not yield by itself, hence this.
    """

    def __init__(self, slice_s: float = SLICE_S, clock: Callable[[], float] = time.perf_counter) -> None:
        self._slice_s = slice_s
        self._clock = clock
        self._since = clock()

    async def breathe(self) -> None:
        """Yield to the loop if the slice is over."""
        if self._clock() - self._since >= self._slice_s:
            await asyncio.sleep(0)
            self._since = self._clock()
