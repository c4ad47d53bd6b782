"""When pools are reconciled: one worker for each, woken by anything, never two at once, with backoff of its own.

Knows neither Kubernetes nor kopf. A wake while a worker is busy is kept, not queued: one more look sees all that happened.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Final, NamedTuple

from prefixpool_operator.kube import KubeError
from prefixpool_operator.metrics import OperatorMetrics, Result

_log = logging.getLogger(__name__)

_LOUD_FAILURES: Final = 3  # of one pool in a row; less is everyday life: somebody wrote first


class PoolKey(NamedTuple):
    """One InferencePool."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Outcome(NamedTuple):
    """Of one reconcile that succeeded."""

    gone: bool = False  # the pool does not exist any more
    wake_after_s: float | None = None


class Pace(NamedTuple):
    """Seconds, but for `concurrency`: pools reconciled at once."""

    concurrency: int = 16
    gap_s: float = 0.25  # between two reconciles of one pool: what happens meanwhile is seen by one look
    first_backoff_s: float = 0.5  # doubles with each failure in a row, jittered
    longest_backoff_s: float = 30.0
    reconcile_s: float = 60.0  # the deadline of one
    resync_s: float = 60.0
    resync_deadline_s: float = 120.0


class _Work:
    """What a worker remembers of its pool. Times are of the controller's clock."""

    def __init__(self) -> None:
        self.woken = asyncio.Event()
        self.not_before = 0.0
        self.due_at: float | None = None
        self.failures = 0


class Controller:
    """`reconcile` brings one pool forward; `resync` lists all and returns those that may need a look."""

    def __init__(
        self,
        reconcile: Callable[[PoolKey], Awaitable[Outcome]],
        resync: Callable[[], Awaitable[Iterable[PoolKey]]],
        *,
        pace: Pace,
        clock: Callable[[], float],
        draw: Callable[[], float],
        metrics: OperatorMetrics,
    ) -> None:
        self._reconcile = reconcile
        self._resync = resync
        self._pace = pace
        self._clock = clock
        self._draw = draw
        self._metrics = metrics
        self._slots = asyncio.Semaphore(pace.concurrency)
        self._works: dict[PoolKey, _Work] = {}
        self._group: asyncio.TaskGroup | None = None
        self._beat_at = clock()
        self.synced = asyncio.Event()  # everything was listed once
        self.unsynced = "pools were not listed yet"  # why not
        metrics.pools.set_function(lambda: len(self._works))
        metrics.queue_depth.set_function(self._waiting)

    def wake(self, key: PoolKey) -> None:
        """Something of this pool may have changed. Only inside the loop that runs the controller; before: no effect."""
        if self._group is None:
            return
        if key not in self._works:
            self._works[key] = _Work()
            self._group.create_task(self._work(key, self._works[key]), name=f"pool {key}")
        self._works[key].woken.set()

    def stale(self) -> str:
        """Why this process should be restarted; "" = it is alive."""
        age_s = self._clock() - self._beat_at
        limit_s = 3 * self._pace.resync_s + self._pace.resync_deadline_s
        return f"the resync loop last turned {age_s:.0f} s ago" if age_s > limit_s else ""

    async def run(self) -> None:
        """Until cancelled."""
        self._beat_at = self._clock()  # others may have led for days
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                await self._resync_for_ever()
            finally:
                self._group = None

    async def _resync_for_ever(self) -> None:
        while True:
            pause_s = self._pace.resync_s
            try:
                async with asyncio.timeout(self._pace.resync_deadline_s):
                    keys = await self._resync()
            except (KubeError, TimeoutError) as error:
                why = str(error) or "no answer in time"
                self.unsynced = f"pools could not be listed: {why}"
                _log.warning("pools could not be listed", extra={"error": why})
                pause_s = min(pause_s, self._pace.longest_backoff_s, 5.0)
            else:
                for key in keys:
                    self.wake(key)
                self.synced.set()
            self._beat_at = self._clock()
            await asyncio.sleep(pause_s * (0.9 + 0.2 * self._draw()))

    async def _work(self, key: PoolKey, work: _Work) -> None:
        while True:
            await self._due(work)
            async with self._slots:
                work.woken.clear()
                gone = await self._attempt(key, work)
            if gone and not work.woken.is_set():
                del self._works[key]
                return

    async def _due(self, work: _Work) -> None:
        await asyncio.sleep(max(0.0, work.not_before - self._clock()))
        left_s = None if work.due_at is None else max(0.0, work.due_at - self._clock())
        with suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await work.woken.wait()

    async def _attempt(self, key: PoolKey, work: _Work) -> bool:
        """True: the pool is gone. Whatever goes wrong with one pool stays with it."""
        started_at = self._clock()
        result = Result.FAILED
        try:
            async with asyncio.timeout(self._pace.reconcile_s):
                outcome = await self._reconcile(key)
        except (KubeError, TimeoutError) as error:
            self._failed(key, work, str(error) or f"not done within {self._pace.reconcile_s:g} s")
            return False
        except Exception as error:  # noqa: BLE001 -- a bug that one pool's spec uncovers must not stop the others
            _log.exception("reconcile broke", extra={"pool": str(key)})
            self._failed(key, work, repr(error))
            return False
        else:
            result = Result.GONE if outcome.gone else Result.DONE
            self._succeeded(work, outcome)
            return outcome.gone
        finally:
            self._metrics.reconciles.labels(result).inc()
            self._metrics.reconcile_seconds.observe(self._clock() - started_at)

    def _succeeded(self, work: _Work, outcome: Outcome) -> None:
        now = self._clock()
        work.failures = 0
        work.not_before = now + self._pace.gap_s
        work.due_at = None if outcome.wake_after_s is None else now + outcome.wake_after_s

    def _failed(self, key: PoolKey, work: _Work, why: str) -> None:
        work.failures += 1
        backoff_s = min(self._pace.longest_backoff_s, self._pace.first_backoff_s * 2 ** min(work.failures - 1, 16))
        pause_s = backoff_s * (0.5 + 0.5 * self._draw())
        work.not_before = work.due_at = self._clock() + pause_s
        level = logging.WARNING if work.failures >= _LOUD_FAILURES else logging.INFO
        _log.log(
            level, "reconcile failed", extra={"pool": str(key), "error": why, "failures": work.failures, "again_s": pause_s}
        )

    def _waiting(self) -> int:
        return sum(work.woken.is_set() for work in self._works.values())
