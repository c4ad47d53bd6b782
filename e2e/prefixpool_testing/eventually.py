"""Waiting for what nobody announces, with a deadline and words for what did not come true."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

PATIENCE_S: Final = 20.0  # where no deadline is promised: only a hang takes so long
POLL_S: Final = 0.02

T = TypeVar("T")


async def eventually(
    check: Callable[[], Awaitable[T]], *, within_s: float = PATIENCE_S, every_s: float = POLL_S, what: str
) -> T:
    """The first truthy result of `check`. Raises AssertionError after `within_s`; a check that hangs counts as false."""
    found: T | None = None
    try:
        async with asyncio.timeout(within_s):
            while not (found := await check()):  # noqa: ASYNC110 -- what is waited for is in other processes
                await asyncio.sleep(every_s)
            return found
    except TimeoutError:
        raise AssertionError(f"not within {within_s:g} s: {what}; last seen: {found!r}") from None
