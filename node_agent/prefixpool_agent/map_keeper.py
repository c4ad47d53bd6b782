"""Keeps what is known of texts for whoever comes after this agent in its run directory."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Final

from prefixpool import names
from prefixpool_agent import saved_map
from prefixpool_agent.follower import Follower
from prefixpool_agent.metrics import AgentMetrics
from prefixpool_agent.residency import Residency

SHARE: Final = 0.02  # of the loop's time, at most, goes into saving

log = logging.getLogger(__name__)


class MapKeeper:
    """`interval_s`: between two saves, at least; 0: none."""

    def __init__(self, run_dir: Path, follower: Follower, metrics: AgentMetrics, *, interval_s: float) -> None:
        self._path = run_dir / names.RUN_SAVED_MAP
        self._follower = follower
        self._metrics = metrics
        self._interval_s = interval_s
        self._due_s = 0.0

    async def keep(self) -> None:
        """While an engine serves: if something is new and it is time."""
        residency, now = self._follower.residency, time.monotonic()
        if not self._interval_s or residency is None or not self._follower.changed_since_save or now < self._due_s:
            return
        saved = self._saved(residency)
        took_s = time.monotonic() - now
        self._follower.changed_since_save = False
        self._due_s = now + max(self._interval_s, took_s / SHARE)
        self._metrics.save_seconds.observe(took_s)
        try:
            await asyncio.to_thread(saved_map.write, self._path, saved)
        except OSError as error:
            log.warning("residency map could not be saved", extra={"error": str(error)})

    def forget(self) -> None:
        """The replica is drained: nobody comes after it here."""
        self._path.unlink(missing_ok=True)

    def _saved(self, residency: Residency) -> saved_map.SavedMap:
        return saved_map.SavedMap(version=saved_map.VERSION, costs=self._follower.costs, residency=residency.save())
