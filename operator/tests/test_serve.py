"""One operator process as a whole: how it ends."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from prefixpool_operator import serve
from prefixpool_operator.election import LeadershipLostError


class Works:
    """Controller and triggers with nothing to do."""

    def __init__(self) -> None:
        self.synced = asyncio.Event()

    async def run(self) -> None:
        await asyncio.Event().wait()


class Breaks:
    def __init__(self, error: Exception) -> None:
        self._error = error

    async def hold(self) -> None:
        raise self._error


@pytest.mark.parametrize("error", [LeadershipLostError("another holder"), RuntimeError("a bug")])
async def test_whatever_ends_the_renewal_of_the_lease_ends_the_process(error: Exception) -> None:
    """Else it would live on, be told healthy, and never write again."""
    stop, ended = asyncio.Event(), list[int]()

    def abort(code: int) -> None:
        ended.append(code)
        stop.set()

    works = cast(Any, Works())
    async with asyncio.timeout(10):
        await serve._lead(stop, cast(Any, Breaks(error)), works, works, abort)
    assert ended == [1]
