"""Keeps the agent running. It holds nothing that the engine needs, so it is simply started again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from prefixpool_agent.supervisor.plan import AgentPlan
from prefixpool_agent.supervisor.process import Child, Reaper, start
from prefixpool_agent.supervisor.restart import AGENT, Backoff, Restarts
from prefixpool_agent.supervisor.state import AgentState

_STOP_S: Final = 5.0
_log = logging.getLogger(__name__)


class AgentKeeper:
    """Owns the agent's process."""

    def __init__(
        self, plan: AgentPlan, reaper: Reaper, changed: Callable[[AgentState], None], rule: Backoff = AGENT
    ) -> None:
        self._plan = plan
        self._reaper = reaper
        self._changed = changed
        self._restarts = Restarts(rule)
        self._child: Child | None = None
        self.state = AgentState()

    async def run(self) -> None:
        """For ever; cancelling it stops the agent."""
        lives = 0
        try:
            while True:
                began_s = time.monotonic()
                reason = await self._life(lives)
                lives += 1
                delay_s = self._restarts.ended(well_s=time.monotonic() - began_s) or 0.0
                _log.warning("agent ended, next start in %g s: %s", delay_s, reason)
                await asyncio.sleep(delay_s)
        finally:
            await self._stop()

    async def _life(self, lives: int) -> str:
        try:
            self._child = start(self._plan, {}, self._reaper)
        except OSError as error:
            return f"{self._plan.argv[0]} cannot be started: {error.strerror}"
        self._set(AgentState(pid=self._child.pid, restarts=lives))
        await asyncio.shield(self._child.exited)
        reason = self._child.reason()
        await self._child.kill_group()
        self._child = None
        self._set(AgentState(pid=None, restarts=lives))
        return reason

    async def _stop(self) -> None:
        if self._child is not None:
            await self._child.stop(_STOP_S)
            self._child = None
            self._set(AgentState(pid=None, restarts=self.state.restarts))

    def _set(self, state: AgentState) -> None:
        self.state = state
        self._changed(state)
