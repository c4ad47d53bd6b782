"""Everything that belongs to one engine start: its gate state, its facts, and the task that follows its events.

An agent that comes back to a running engine restores the map that its predecessor saved, lets the engine replay its events,
then asks the gates for their recent notes, and at last for full reports of what is still unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path
from typing import Final, NamedTuple

import zmq.asyncio

from prefixpool import names
from prefixpool_agent import saved_map
from prefixpool_agent.disk_follower import DiskFollower
from prefixpool_agent.engines.base import EngineFacts
from prefixpool_agent.follower import Follower
from prefixpool_agent.gate_state import GateState, GateStateError
from prefixpool_agent.kv_events import KvEvents
from prefixpool_agent.model_text import ModelText
from prefixpool_agent.notes import Notes
from prefixpool_agent.residency import Limits, Residency

CATCH_UP_S: Final = 15.0  # for the first replay; notes that are asked for too early would wait for events in vain
NO_ENDPOINT_S: Final = 3.0
RING_S: Final = 3.0  # for the gates' notes of the past; thousands take well under a second

log = logging.getLogger(__name__)


class Parts(NamedTuple):
    """What outlives engine starts."""

    run_dir: Path
    zmq: zmq.asyncio.Context
    follower: Follower
    notes: Notes
    text: ModelText
    limits: Limits
    disk: DiskFollower


class Attachment:
    """From the moment that the engine serves until it is gone. `close()` must be awaited."""

    def __init__(self, parts: Parts, epoch: int, facts: EngineFacts) -> None:
        self._parts = parts
        self.epoch = epoch
        self.facts = facts
        self.since_s = time.monotonic()
        self._begin()
        endpoints = [f"ipc://{parts.run_dir / name}" for name in (names.RUN_KV_PUB, names.RUN_KV_REPLAY)]
        self.events = KvEvents(parts.zmq, endpoints[0], endpoints[1], parts.follower)
        self._tasks = [
            asyncio.create_task(self.events.run(), name="kv events"),
            asyncio.create_task(self._catch_up(), name="catch up"),
        ]

    def _begin(self) -> None:
        """The picture that earlier engine starts left, forgotten but for facts about texts; or a new one."""
        follower, block_tokens, text = self._parts.follower, self.facts.block_tokens, self._parts.text
        residency, costs = follower.residency, None
        if text.table is not None and (residency is None or follower.block_tokens != block_tokens):
            residency = Residency(text.table, block_tokens, template=text.template, limits=self._parts.limits)
            saved = saved_map.read(self._parts.run_dir / names.RUN_SAVED_MAP)
            if saved is not None:
                costs = saved.costs
                restored = residency.restore(saved.residency, own=True)
                log.info("restored what an agent before this one knew", extra={"boundaries": restored})
        follower.begin(residency, block_tokens, costs)

    async def _catch_up(self) -> None:
        """Events first, then notes: an ended request's note can wait for its events only so long."""
        for wait_s in (NO_ENDPOINT_S, CATCH_UP_S):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self.events.caught_up.wait()
            if self.events.caught_up.is_set() or not self.events.connected:
                break
        notes = self._parts.notes
        notes.begin(self.epoch)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RING_S):
                await notes.caught_up.wait()
        self._parts.follower.caught_up()
        self._parts.follower.heal()

    @property
    def failed(self) -> bool:
        """A bug ended the following: what is known is no longer kept true."""
        return any(task.done() and not task.cancelled() and task.exception() is not None for task in self._tasks)

    async def close(self) -> None:
        """Stop following."""
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                log.error("following the engine failed", exc_info=result)


class GateView:
    """The gate's shared state of the present engine start; all zero while there is none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._state: GateState | None = None

    def reopen(self) -> None:
        """Another engine start: the supervisor put a fresh file in place."""
        self.close()
        try:
            self._state = GateState(self._path)
        except GateStateError as error:
            log.warning("gate state is not readable", extra={"error": str(error)})

    def close(self) -> None:
        """Unmap."""
        if self._state is not None:
            self._state.close()
            self._state = None

    @property
    def inflight(self) -> int:
        """Requests inside the gate."""
        return self._state.inflight() if self._state is not None else 0

    @property
    def fenced(self) -> bool:
        """New requests are refused."""
        return self._state.fenced if self._state is not None else False

    def fence(self, on: bool) -> None:
        """In all API server processes at once."""
        if self._state is not None:
            self._state.fence(on)
