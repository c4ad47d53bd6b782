"""The engine's own figures, read from its metrics now and then."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from prefixpool_agent.disk_health import DiskHealth
from prefixpool_agent.engine_client import EngineClient, EngineError
from prefixpool_agent.engines.metrics import EngineLoad
from prefixpool_agent.metrics import AgentMetrics

IDLE_TURNS: Final = 5  # an idle engine's metrics are read this much less often

log = logging.getLogger(__name__)


class EngineFigures:
    """`last`: as they were read last, of the engine that runs."""

    def __init__(self, engine: EngineClient, metrics: AgentMetrics, *, interval_s: float) -> None:
        self._engine = engine
        self._metrics = metrics
        self._interval_s = interval_s
        self.last = EngineLoad()
        self.disk = DiskHealth()

    def forget(self) -> None:
        """The engine is gone."""
        self.last = EngineLoad()
        self.disk.forget()

    async def run(self, serves: Callable[[], bool], inflight: Callable[[], int]) -> None:
        """Until cancelled. `serves`: there is an engine to ask; `inflight`: requests that its gate has let in."""
        turn = 0
        while True:
            await asyncio.sleep(self._interval_s)
            turn += 1
            idle = not (inflight() or self.last.running or self.last.waiting)
            if serves() and not (idle and turn % IDLE_TURNS):
                await self._read()

    async def _read(self) -> None:
        try:
            with self._metrics.scrape_seconds.time():
                self.last = await self._engine.load()
        except EngineError as error:
            self._metrics.scrapes.labels("failed").inc()
            log.debug("engine metrics", extra={"error": str(error)})
        else:
            self._metrics.scrapes.labels("good").inc()
            self._metrics.tiers.read(self.last)
            self.disk.read(self.last.disk)
