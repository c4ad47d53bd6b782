"""A router of `prefixpool up` that dies or hangs, on a clock of its own."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from prefixpool_cli import router_keeper
from prefixpool_cli.errors import PoolError
from prefixpool_cli.local_pool import LocalPool
from prefixpool_cli.pool_watch import Progress, Stage
from prefixpool_cli.router_keeper import RouterKeeper

pytestmark = pytest.mark.looptime


class FakePool:
    """`starts`: what becomes of each start. It hangs, or has ended, from `lost_s` on, until it is started again."""

    def __init__(self, starts: list[PoolError | None], *, hangs: bool, lost_s: float = 10.0) -> None:
        self.routers = [SimpleNamespace(name="router-0", ended=None)]
        self.events: list[str] = []
        self._starts: Iterator[PoolError | None] = iter(starts)
        self._hangs = hangs
        self._lost_s = lost_s

    def _lost(self) -> bool:
        lost = asyncio.get_running_loop().time() >= self._lost_s
        if lost and not self._hangs:
            self.routers[0].ended = -9
        return lost

    async def router_answers(self, number: int) -> bool:
        lost = self._lost()
        await asyncio.sleep(5 if lost and self._hangs else 0)  # as long as one waits for an answer
        return not lost

    async def end_router(self, number: int) -> None:
        self.events.append(f"ended at {asyncio.get_running_loop().time():g}")

    async def start_router(self, number: int, *, progress: Progress, timeout_s: float) -> None:
        progress(Stage("router-0", "starting", 0.0, 0.0))
        for _ in range(2):
            progress(Stage("router-0", "not ready yet: no usable replica", 0.5, 1.0))
        error = next(self._starts)
        if error is not None:
            raise error
        self._lost_s = float("inf")
        self.routers[0].ended = None


async def told(pool: FakePool, seconds: float) -> tuple[list[str], PoolError | None]:
    """What a keeper said in so many seconds, and why it gave up."""
    said: list[str] = []
    keeper = asyncio.ensure_future(RouterKeeper(cast(LocalPool, pool), 0, said.append).run())
    done, _ = await asyncio.wait([keeper], timeout=seconds)
    keeper.cancel()
    await asyncio.gather(keeper, return_exceptions=True)
    return said, keeper.result() if done else None


async def test_a_router_that_hung_was_never_replaced() -> None:
    pool = FakePool([None], hangs=True)
    said, given_up = await told(pool, 100)
    assert said == [
        "router-0 has not answered for 20 s; starting it again",
        "router-0: not ready yet: no usable replica",
        "router-0 is ready again",
    ]
    assert given_up is None
    (event,) = pool.events
    assert 30 <= float(event.removeprefix("ended at ")) <= 40


async def test_a_router_that_answers_in_between_is_left_alone() -> None:
    pool = FakePool([], hangs=True)
    lags: Any = iter([False] * 10)

    async def answers(number: int) -> bool:
        await asyncio.sleep(4)
        return next(lags, True) or asyncio.get_running_loop().time() % 15 < 5

    pool.router_answers = answers  # type: ignore[method-assign]  # a machine that is loaded, not a router that hangs
    assert await told(pool, 300) == ([], None)


async def test_a_router_that_ends_is_started_again_at_once() -> None:
    pool = FakePool([None], hangs=False)
    said, _ = await told(pool, 13)
    assert said[0] == "router-0 ended with code -9; starting it again"
    assert said[-1] == "router-0 is ready again"


async def test_a_router_that_is_slow_to_come_back_is_tried_again_and_told() -> None:
    late = PoolError("router-0 does not answer after 60 s")
    said, given_up = await told(FakePool([late, late, None], hangs=False), 100)
    assert said.count("router-0 does not answer after 60 s; trying again") == 2
    assert said[-1] == "router-0 is ready again"
    assert given_up is None


async def test_a_router_that_dies_again_and_again_is_given_up() -> None:
    died = [PoolError(f"router-0 ended with code {code}") for code in range(router_keeper.MOST_FAILURES)]
    said, given_up = await told(FakePool(list(died), hangs=False), 100)
    assert given_up is died[-1]
    assert said[-1] == f"router-0 ended with code {router_keeper.MOST_FAILURES - 1}; router-0 is given up"
