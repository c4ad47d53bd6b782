"""Watches the engine from outside: what the supervisor writes, and whether `/health` answers. Tells of each look."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, NamedTuple

from prefixpool_agent.engine_client import EngineClient
from prefixpool_agent.engine_state import HealthCount
from prefixpool_agent.supervisor_client import EnginePhase, EngineProcess, SupervisorError, SupervisorState, read_state

POLL_S: Final = 0.2  # of the state file: routers reach a new state within 2 s, most of which is theirs
HEALTH_STARTING_S: Final = 0.5
HEALTH_RUNNING_S: Final = 2.0

log = logging.getLogger(__name__)


class Look(NamedTuple):
    """One look at the engine."""

    process: EngineProcess
    healthy: bool
    reason: str


class EngineWatch:
    """`saw` is awaited with each look; it must not take long."""

    def __init__(
        self,
        run_dir: Path,
        engine: EngineClient,
        saw: Callable[[Look], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir = run_dir
        self._engine = engine
        self._saw = saw
        self._clock = clock
        self._health = HealthCount()
        self._reason = ""
        self._checked_s = float("-inf")
        self._process = EngineProcess(phase=EnginePhase.BACKOFF, reason="the supervisor has not started it yet")
        self._hurry = asyncio.Event()
        self._probe: asyncio.Task[None] | None = None

    def nudge(self) -> None:
        """Something happened to the engine: look at once."""
        self._checked_s = float("-inf")
        self._hurry.set()

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                await self._saw(self.look())
                await self._pause()
        finally:
            await self.close()

    async def close(self) -> None:
        """End a probe that is under way."""
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.wait([self._probe])

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(POLL_S):
                await self._hurry.wait()
        except TimeoutError:
            return
        finally:
            self._hurry.clear()

    def look(self) -> Look:
        """The state file, and what the last probe of `/health` found; starts a probe if it is time."""
        process = self._read()
        if (process.epoch, process.phase) != (self._process.epoch, self._process.phase):
            self._health.forget()
            self._checked_s = float("-inf")
        self._process = process
        if process.phase is EnginePhase.RUNNING:
            self._check()
        reason = process.reason or "" if process.phase is not EnginePhase.RUNNING else self._reason
        return Look(process, self._health.healthy and process.phase is EnginePhase.RUNNING, reason)

    def _read(self) -> EngineProcess:
        try:
            state: SupervisorState | None = read_state(self._run_dir)
        except SupervisorError as error:
            log.warning("supervisor state is unreadable", extra={"error": str(error)})
            return self._process
        return state.engine if state is not None else self._process

    def _check(self) -> None:
        """A probe of its own, because one that gets no answer must not delay news from the supervisor."""
        due = HEALTH_RUNNING_S if self._health.healthy else HEALTH_STARTING_S
        if self._clock() - self._checked_s >= due and (self._probe is None or self._probe.done()):
            self._checked_s = self._clock()
            self._probe = asyncio.create_task(self._ask(self._process.epoch), name="engine health")

    async def _ask(self, epoch: int) -> None:
        health = await self._engine.health()
        if epoch != self._process.epoch:
            return
        self._reason = health.reason
        changed = self._health.healthy
        if health.good:
            self._health.good()
        else:
            self._health.bad(health.certain)
        if changed != self._health.healthy:
            self._hurry.set()
