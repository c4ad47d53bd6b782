"""Drain of one replica: fence, let the running requests end, stop the engine (design: 6). Pure steps and a small shell.

vLLM's own drain is not used: while it runs, new requests get empty answers, and afterwards the API server hangs
(research: vllm.md 6). The fence comes first, so that nothing new arrives; then time is all that is needed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from prefixpool.errors import PrefixpoolError
from prefixpool.wire import DrainPhase, DrainRequest, DrainStatus

POLL_S: Final = 0.05

log = logging.getLogger(__name__)


class DrainRefusedError(PrefixpoolError):
    """The drain cannot be lifted any more."""


class View(NamedTuple):
    """What a step looks at. `unacknowledged`: connected routers that may still send something."""

    now_s: float
    inflight: int
    unacknowledged: int


class Plan(NamedTuple):
    """A drain in progress. Times are monotonic seconds."""

    phase: DrainPhase
    stop: bool
    ack_until_s: float
    deadline_s: float
    forced: bool = False
    failed: bool = False  # the engine could not be stopped: it may run on
    reason: str = ""


def begin(request: DrainRequest, now_s: float, ack_s: float) -> Plan:
    """The first step: everything is counted from here."""
    return Plan(
        DrainPhase.FENCING,
        request.stop,
        ack_until_s=now_s + min(ack_s, request.timeout_s),
        deadline_s=now_s + request.timeout_s,
        reason="waiting for routers to send nothing new",
    )


def advance(plan: Plan, view: View) -> Plan:
    """FENCING -> WAITING -> STOPPING (or DONE without `stop`), as far as the view allows; else the same plan."""
    if plan.phase is DrainPhase.FENCING and (not view.unacknowledged or view.now_s >= plan.ack_until_s):
        plan = plan._replace(phase=DrainPhase.WAITING, reason="waiting for running requests")
    if plan.phase is DrainPhase.WAITING and (not view.inflight or view.now_s >= plan.deadline_s):
        forced = view.inflight > 0 and plan.stop
        reason = f"{view.inflight} requests were still running at the deadline" if view.inflight else "all requests ended"
        phase = DrainPhase.STOPPING if plan.stop else DrainPhase.DONE
        plan = plan._replace(phase=phase, forced=forced, reason=reason)
    return plan


class DrainActions(Protocol):
    """What a drain does to the world."""

    def fence(self, on: bool) -> None:
        """Refuse new requests and tell the routers, or accept again."""
        ...

    def view(self, now_s: float) -> View:
        """Look."""
        ...

    async def stop_engine(self) -> None:
        """Returns when the engine is gone. Raises PrefixpoolError."""
        ...

    async def clean(self) -> None:
        """Remove what the engine left behind."""
        ...

    def phase_changed(self, phase: DrainPhase) -> None:
        """For metrics and routers."""
        ...


class Drain:
    """At most one drain at a time. The task that runs it belongs to this object."""

    def __init__(self, actions: DrainActions, ack_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._actions = actions
        self._ack_s = ack_s
        self._clock = clock
        self._plan: Plan | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def active(self) -> bool:
        """Fenced by a drain, running or done."""
        return self._plan is not None

    def start(self, request: DrainRequest) -> DrainStatus:
        """Idempotent: a running or finished drain is returned as it is.

        One that only fenced may be asked to stop, too, and one that could not stop the engine to try again.
        """
        upgrade = self._plan is not None and request.stop and not self._plan.stop
        if self._plan is None or upgrade or self._plan.failed:
            self._cancel()
            self._set(begin(request, self._clock(), self._ack_s))
            self._actions.fence(True)
            self._task = asyncio.create_task(self._run(), name="drain")
        return self.status()

    async def wait(self) -> DrainStatus:
        """Until the drain is over."""
        if self._task is not None:
            await asyncio.wait([self._task])
        return self.status()

    def lift(self) -> DrainStatus:
        """Accept requests again, also after a fence that an agent before this one set.

        Raises DrainRefusedError once the engine is being stopped, unless that failed.
        """
        if (
            self._plan is not None
            and self._plan.stop
            and not self._plan.failed
            and self._plan.phase in (DrainPhase.STOPPING, DrainPhase.CLEANING, DrainPhase.DONE)
        ):
            raise DrainRefusedError("the engine was stopped by this drain; start the replica again instead")
        self._cancel()
        self._plan = None
        self._actions.fence(False)
        self._actions.phase_changed(DrainPhase.NONE)
        return self.status()

    def forget(self) -> None:
        """The engine was started anew by somebody: the drain that stopped it is history."""
        if self._plan is not None and self._plan.stop and self._plan.phase is DrainPhase.DONE:
            self._plan = None
            self._actions.phase_changed(DrainPhase.NONE)

    def status(self) -> DrainStatus:
        """Where it stands."""
        now = self._clock()
        view = self._actions.view(now)
        if self._plan is None:
            return DrainStatus(inflight=view.inflight)
        over = self._plan.phase in (DrainPhase.CLEANING, DrainPhase.DONE)
        return DrainStatus(
            phase=self._plan.phase,
            inflight=view.inflight,
            remaining_s=0.0 if over else max(0.0, self._plan.deadline_s - now),
            forced=self._plan.forced,
            reason=self._plan.reason,
        )

    async def close(self) -> None:
        """The agent ends; the fence stays, because it is in the shared state."""
        task = self._task
        self._cancel()
        if task is not None:
            await asyncio.wait([task])

    async def _run(self) -> None:
        while (plan := self._plan) is not None and plan.phase in (DrainPhase.FENCING, DrainPhase.WAITING):
            self._set(advance(plan, self._actions.view(self._clock())))
            if self._plan == plan:
                await asyncio.sleep(POLL_S)
        if plan is not None and plan.phase is DrainPhase.STOPPING:
            await self._stop(plan)

    async def _stop(self, plan: Plan) -> None:
        try:
            await self._actions.stop_engine()
        except PrefixpoolError as error:
            log.error("drain could not stop the engine", extra={"error": str(error)})  # noqa: TRY400  not a bug of ours
            reason = f"{plan.reason}; stopping failed: {error}"
            self._set(plan._replace(phase=DrainPhase.DONE, failed=True, reason=reason))
            return
        self._set(plan._replace(phase=DrainPhase.CLEANING))
        await self._actions.clean()
        self._set(plan._replace(phase=DrainPhase.DONE))

    def _set(self, plan: Plan) -> None:
        changed = self._plan is None or self._plan.phase is not plan.phase
        self._plan = plan
        if changed:
            log.info("drain", extra={"phase": plan.phase.value, "reason": plan.reason})
            self._actions.phase_changed(plan.phase)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None
