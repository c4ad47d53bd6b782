"""Waiting for what nobody announces, with a deadline and words for what did not come true."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

PATIENCE_S: Final = 20.0  # where no deadline is promised: only a hang takes so long
POLL_S: Final = 0.02
_RARER: Final = 1.1  # each pause is so much longer than the one before: looks take CPU from what is waited for
_RAREST_S: Final = 0.5

T = TypeVar("T")


async def eventually(
    check: Callable[[], Awaitable[T]], *, within_s: float = PATIENCE_S, every_s: float = POLL_S, what: str
) -> T:
    """The first truthy result of `check`. Raises AssertionError after `within_s`; a check that hangs counts as false.

    `every_s`: the first pause between two looks. What takes long is looked at less often.
    """
    found: T | None = None
    pause_s = every_s
    try:
        async with asyncio.timeout(within_s):
            while not (found := await check()):
                await asyncio.sleep(pause_s)
                pause_s = max(every_s, min(pause_s * _RARER, _RAREST_S))
            return found
    except TimeoutError:
        raise AssertionError(f"not within {within_s:g} s: {what}; last seen: {found!r}") from None
