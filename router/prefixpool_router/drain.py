"""Stopping without breaking anything: not ready at once, but still accepting until everyone has noticed, then no longer.

Load balancers need seconds to see that a router is not ready. Until then it accepts, and asks each client by
`Connection: close` to connect anew, elsewhere. Then it stops listening and lets running answers end, up to a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Protocol

_log = logging.getLogger(__name__)


class Draining:
    """Whether this router is on its way out: begun once, perhaps hurried later."""

    def __init__(self) -> None:
        self._begun = asyncio.Event()
        self._hurried = asyncio.Event()

    @property
    def begun(self) -> bool:
        return self._begun.is_set()

    def begin(self, *, hurry: bool = False) -> None:
        """`hurry`: nobody needs to notice first (a person's Ctrl-C, a dead parent). Idempotent."""
        self._begun.set()
        if hurry:
            self._hurried.set()

    async def wait(self) -> None:
        """Until it begins."""
        await self._begun.wait()

    async def begun_within(self, timeout_s: float) -> bool:
        """Sleep so long, or until it begins."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._begun.wait()
        return self.begun

    async def noticed(self, accept_s: float) -> None:
        """Until everyone has noticed: so many seconds, or at once in a hurry."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(accept_s):
                await self.hurried()

    async def hurried(self) -> None:
        """Until it becomes urgent."""
        await self._hurried.wait()


class Server(Protocol):
    """As far as a drain is concerned."""

    def begin_drain(self) -> None:
        """Ask every client to connect anew from now on; go on accepting."""
        ...

    async def stop(self, timeout_s: float) -> int:
        """Stop listening, let running answers end; how many were cut off at the deadline."""
        ...


async def drain(server: Server, draining: Draining, *, accept_s: float, timeout_s: float) -> int:
    """Once `draining` has begun; how many answers were cut off."""
    _log.info("draining", extra={"accept_s": accept_s, "timeout_s": timeout_s})
    server.begin_drain()
    await draining.noticed(accept_s)
    cut_off = await server.stop(timeout_s)
    _log.info("drained", extra={"cut_off": cut_off})
    return cut_off
