"""Stopping without breaking anything: not ready at once, but still accepting until everyone has noticed, then no longer.

Load balancers need seconds to see that a router is not ready. Until then it accepts, and asks each client by
`Connection: close` to connect anew, elsewhere. Then it stops listening and lets running answers end, up to a deadline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

_log = logging.getLogger(__name__)


class Draining:
    """Whether this router is on its way out. Set once."""

    def __init__(self) -> None:
        self._begun = asyncio.Event()

    @property
    def begun(self) -> bool:
        return self._begun.is_set()

    def begin(self) -> None:
        """Idempotent."""
        self._begun.set()

    async def wait(self) -> None:
        """Until it begins."""
        await self._begun.wait()


class Stoppable(Protocol):
    """A server, as far as a drain is concerned."""

    async def stop(self, timeout_s: float) -> None:
        """Stop listening, close idle connections, let running answers end; cut off what is left at the deadline."""
        ...


async def drain(
    server: Stoppable,
    *,
    accept_s: float,
    timeout_s: float,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """After `Draining.begin`: the two waits of the module's text."""
    _log.info("draining", extra={"accept_s": accept_s, "timeout_s": timeout_s})
    await sleep(accept_s)
    await server.stop(timeout_s)
    _log.info("drained")
