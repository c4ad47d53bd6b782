"""When pools are reconciled. Time is the event loop's, compressed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from prefixpool_operator.controller import Controller, Outcome, Pace, PoolKey
from prefixpool_operator.kube import UnavailableError
from prefixpool_operator.metrics import OperatorMetrics

A, B = PoolKey("ns", "a"), PoolKey("ns", "b")
PACE = Pace(concurrency=4, gap_s=0.25, resync_s=1000)

pytestmark = pytest.mark.looptime(start=0)


async def no_pools() -> Iterable[PoolKey]:
    return ()


class Seen:
    """What was reconciled when, and how many at once."""

    def __init__(self) -> None:
        self.times: dict[PoolKey, list[float]] = {}
        self.running: Counter[PoolKey] = Counter()
        self.most_at_once = 0
        self.takes_s = 0.0
        self.outcome: Callable[[PoolKey], Outcome] = lambda key: Outcome()

    async def reconcile(self, key: PoolKey) -> Outcome:
        self.times.setdefault(key, []).append(now())
        assert not self.running[key], "two at once for one pool"
        self.running[key] += 1
        self.most_at_once = max(self.most_at_once, self.running.total())
        try:
            await asyncio.sleep(self.takes_s)
            return self.outcome(key)
        finally:
            self.running[key] -= 1


def now() -> float:
    return asyncio.get_running_loop().time()


@asynccontextmanager
async def running(
    reconcile: Callable[[PoolKey], Awaitable[Outcome]],
    resync: Callable[[], Awaitable[Iterable[PoolKey]]] = no_pools,
    pace: Pace = PACE,
    registry: CollectorRegistry | None = None,
) -> AsyncIterator[Controller]:
    metrics = OperatorMetrics(registry or CollectorRegistry())
    controller = Controller(reconcile, resync, pace=pace, clock=now, draw=lambda: 0.5, metrics=metrics)
    task = asyncio.create_task(controller.run())
    await controller.synced.wait() if resync is no_pools else await asyncio.sleep(0)
    try:
        yield controller
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_wakes_while_a_pool_is_busy_become_one_more_look() -> None:
    seen = Seen()
    seen.takes_s = 1
    async with running(seen.reconcile) as controller:
        controller.wake(A)
        await asyncio.sleep(0.5)
        for _ in range(100):
            controller.wake(A)
        await asyncio.sleep(60)
    assert len(seen.times[A]) == 2


async def test_a_wake_in_the_last_moment_of_a_look_is_not_lost() -> None:
    seen = Seen()
    async with running(seen.reconcile) as controller:

        def wake_again(key: PoolKey) -> Outcome:
            if len(seen.times[A]) == 1:
                controller.wake(A)
            return Outcome()

        seen.outcome = wake_again
        controller.wake(A)
        await asyncio.sleep(60)
    assert len(seen.times[A]) == 2
    assert seen.times[A][1] - seen.times[A][0] == pytest.approx(PACE.gap_s)


async def test_many_pools_are_reconciled_beside_each_other_but_not_all_at_once() -> None:
    seen = Seen()
    seen.takes_s = 1
    async with running(seen.reconcile) as controller:
        for number in range(40):
            controller.wake(PoolKey("ns", str(number)))
        await asyncio.sleep(10.5)
    assert len(seen.times) == 40
    assert seen.most_at_once == PACE.concurrency


async def test_failures_back_off_and_a_success_ends_that() -> None:
    seen = Seen()
    registry = CollectorRegistry()

    def fail(key: PoolKey) -> Outcome:
        raise UnavailableError("down")

    seen.outcome = fail
    async with running(seen.reconcile, registry=registry) as controller:
        controller.wake(A)
        await asyncio.sleep(200)
        gaps = [b - a for a, b in zip(seen.times[A], seen.times[A][1:], strict=False)]
        assert gaps[0] < 1
        assert gaps == sorted(gaps)
        assert PACE.longest_backoff_s / 2 <= gaps[-1] <= PACE.longest_backoff_s
        seen.outcome = lambda key: Outcome()
        await asyncio.sleep(40)
        looks = len(seen.times[A])
        controller.wake(A)
        await asyncio.sleep(1)
        assert len(seen.times[A]) == looks + 1
    assert registry.get_sample_value("prefixpool_operator_reconciles_total", {"result": "failed"}) == len(gaps) + 1


async def test_wakes_do_not_shorten_a_backoff() -> None:
    seen = Seen()

    def fail(key: PoolKey) -> Outcome:
        raise UnavailableError("down")

    seen.outcome = fail
    async with running(seen.reconcile) as controller:
        for _ in range(600):
            controller.wake(A)
            await asyncio.sleep(0.1)
    assert len(seen.times[A]) < 12


async def test_a_bug_that_one_pool_uncovers_stays_with_it(caplog: pytest.LogCaptureFixture) -> None:
    seen = Seen()

    def broken(key: PoolKey) -> Outcome:
        if key == A:
            raise KeyError("spec")
        return Outcome()

    seen.outcome = broken
    async with running(seen.reconcile) as controller:
        controller.wake(A)
        controller.wake(B)
        await asyncio.sleep(20)
        controller.wake(B)
        await asyncio.sleep(1)
    assert len(seen.times[A]) > 2
    assert len(seen.times[B]) == 2
    assert "KeyError" in caplog.text


async def test_a_reconcile_that_hangs_is_ended() -> None:
    seen = Seen()
    seen.takes_s = 10_000
    async with running(seen.reconcile) as controller:
        controller.wake(A)
        await asyncio.sleep(PACE.reconcile_s + 2)
    assert len(seen.times[A]) == 2


async def test_a_deadline_wakes_a_pool_once() -> None:
    seen = Seen()
    seen.outcome = lambda key: Outcome(wake_after_s=5.0 if len(seen.times[key]) == 1 else None)
    async with running(seen.reconcile) as controller:
        controller.wake(A)
        await asyncio.sleep(600)
    assert seen.times[A] == [0, pytest.approx(5)]


async def test_a_pool_that_is_gone_is_forgotten_until_it_is_back() -> None:
    seen = Seen()
    seen.outcome = lambda key: Outcome(gone=True)
    registry = CollectorRegistry()
    async with running(seen.reconcile, registry=registry) as controller:
        controller.wake(A)
        await asyncio.sleep(1)
        assert registry.get_sample_value("prefixpool_operator_pools") == 0
        seen.outcome = lambda key: Outcome()
        controller.wake(A)
        await asyncio.sleep(1)
        assert registry.get_sample_value("prefixpool_operator_pools") == 1
    assert len(seen.times[A]) == 2


async def test_the_resync_wakes_what_watching_missed_and_survives_an_outage() -> None:
    seen = Seen()
    rounds = 0

    async def resync() -> Iterable[PoolKey]:
        nonlocal rounds
        rounds += 1
        if rounds in (1, 3):
            raise UnavailableError("down")
        return (A,)

    async with running(seen.reconcile, resync, PACE._replace(resync_s=10)) as controller:
        await asyncio.sleep(4)
        assert not controller.synced.is_set()
        assert not seen.times
        await asyncio.sleep(40)
        assert controller.synced.is_set()
    assert len(seen.times[A]) == rounds - 2 >= 2


async def test_why_pools_cannot_be_listed_is_there_to_be_told() -> None:
    async def resync() -> Iterable[PoolKey]:
        raise UnavailableError("apply crds/")

    async with running(Seen().reconcile, resync) as controller:
        await asyncio.sleep(1)
        assert not controller.synced.is_set()
        assert controller.unsynced == "pools could not be listed: apply crds/"


async def test_liveness_ends_when_the_resync_hangs_for_good() -> None:
    """A call without a deadline would stop the loop while the process lives on."""
    pace = PACE._replace(resync_s=10, resync_deadline_s=20)

    async def deaf() -> Iterable[PoolKey]:
        while True:  # swallows even the deadline
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if now() > 100:
                    raise

    async with running(Seen().reconcile, deaf, pace) as controller:
        await asyncio.sleep(3 * 10 + 20)
        assert controller.stale() == ""
        await asyncio.sleep(60)
        assert "resync loop" in controller.stale()
