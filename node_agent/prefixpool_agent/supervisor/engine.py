"""Keeps the engine running: one life after another, each with an epoch, a fresh gate state and a clean end."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from prefixpool import names
from prefixpool_agent import shm
from prefixpool_agent.gate_state import GateState, GateStateError
from prefixpool_agent.supervisor.plan import EnginePlan
from prefixpool_agent.supervisor.process import Child, Reaper, start
from prefixpool_agent.supervisor.restart import ENGINE, Backoff, Restarts
from prefixpool_agent.supervisor.state import EngineState, Phase

KILL_AFTER_S: Final = 5.0  # behind the engine's own time to stop
_STARTING_TICK_S: Final = 0.1
_TICK_S: Final = 1.0
_SHM_STARTING_S: Final = 0.5
_SHM_S: Final = 10.0
_SOCKETS: Final = (names.RUN_KV_PUB, names.RUN_KV_REPLAY)
_VLLM_SOCKETS: Final = "????????-????-????-????-????????????"  # named by UUIDs; vLLM leaves them behind, even after SIGTERM
_log = logging.getLogger(__name__)


class EngineKeeper:
    """Owns the engine's process. `changed` is called after each change of `state`."""

    def __init__(
        self, plan: EnginePlan, run_dir: Path, reaper: Reaper, changed: Callable[[EngineState], None], rule: Backoff = ENGINE
    ) -> None:
        self._plan = plan
        self._run_dir = run_dir
        self._reaper = reaper
        self._changed = changed
        self._restarts = Restarts(rule)
        self._wanted = asyncio.Event()
        self._unwanted = asyncio.Event()
        self._down = asyncio.Event()
        self._down.set()
        self._stop_timeout_s = plan.stop_timeout_s
        self._lives = 0
        self.state = EngineState()
        self.start()

    def start(self) -> None:
        """Start the engine unless it runs; ends a back-off and forgets failures."""
        self._restarts.forget()
        self._unwanted.clear()
        self._wanted.set()

    async def stop(self, timeout_s: float | None = None) -> None:
        """SIGTERM, SIGKILL of the group after `timeout_s` + 5; returns when all is gone; it stays stopped."""
        self._stop_timeout_s = self._plan.stop_timeout_s if timeout_s is None else timeout_s
        self._wanted.clear()
        self._unwanted.set()
        await self._down.wait()
        self._set(phase=Phase.STOPPED, pid=None)

    async def run(self) -> None:
        """For ever; end by `stop()` and cancelling."""
        while True:
            await self._wanted.wait()
            self._down.clear()
            try:
                delay_s = await self._life()
            finally:
                self._down.set()
            if not self._wanted.is_set():
                continue
            if delay_s is None:
                self._wanted.clear()
                self._set(phase=Phase.GAVE_UP, pid=None)
                _log.error("engine given up: %s", self.state.reason)
                continue
            self._set(phase=Phase.BACKOFF, pid=None)
            _log.warning("engine ended, next start in %g s: %s", delay_s, self.state.reason)
            await self._pause(delay_s)

    async def _pause(self, delay_s: float) -> None:
        """Until the delay is over or somebody asks for something."""
        self._wanted.clear()
        try:
            async with asyncio.timeout(delay_s):
                waits = [asyncio.ensure_future(event.wait()) for event in (self._wanted, self._unwanted)]
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for wait in waits:
                        wait.cancel()
        except TimeoutError:
            if not self._unwanted.is_set():
                self._wanted.set()

    async def _life(self) -> float | None:
        """One engine from start to a clean end; seconds until the next start, None: give up."""
        epoch = max(time.time_ns(), self.state.epoch + 1)
        try:
            self._prepare()
            child = start(self._plan, {names.ENV_EPOCH: str(epoch)}, self._reaper)
        except OSError as error:
            self._set(epoch=epoch, reason=f"{self._plan.argv[0]} cannot be started: {error}")
            return self._restarts.ended(well_s=None)
        self._set(pid=child.pid, epoch=epoch, phase=Phase.RUNNING, restarts=self._lives, started_ns=epoch, shm=())
        self._lives += 1
        watch = _Watch(child, self._run_dir, self._plan.startup_timeout_s)
        try:
            reason = await self._until_over(watch)
        finally:
            await self._clean(child)
        self._set(pid=None, reason=reason or child.reason())
        return self._restarts.ended(well_s=watch.well_s())

    async def _until_over(self, watch: _Watch) -> str:
        """Wait for the end, and bring it about when nobody wants the engine or it takes too long; "" if it ended itself."""
        stop = asyncio.ensure_future(self._unwanted.wait())
        ends: set[asyncio.Future[Any]] = {watch.child.exited, stop}
        try:
            while not watch.child.exited.done():
                if self._unwanted.is_set():
                    self._record_shm(watch.child)
                    await watch.child.stop(self._stop_timeout_s + KILL_AFTER_S)
                    return "stopped on request"
                if watch.late():
                    return watch.child.reason(what=f"not ready {self._plan.startup_timeout_s:g} s after {watch.since}")
                if watch.shm_due():
                    self._record_shm(watch.child)
                await asyncio.wait(ends, timeout=watch.tick_s(), return_when=asyncio.FIRST_COMPLETED)
            return ""
        finally:
            stop.cancel()

    def _prepare(self) -> None:
        GateState.create(self._run_dir / names.RUN_GATE_STATE)
        self._remove_sockets()

    async def _clean(self, child: Child) -> None:
        """Kill what is left of the group; remove sockets and shared memory."""
        self._record_shm(child)  # survivors of the group still show what they have mapped
        await child.kill_group()
        self._remove_sockets()
        removed = shm.remove(self.state.shm)
        if removed:
            _log.info("removed %d shared memory files of the dead engine", len(removed))
        self._set(shm=())

    def _record_shm(self, child: Child) -> None:
        found = shm.mapped_files(shm.group_members(child.pid)) - set(self.state.shm)
        if found:
            self._set(shm=tuple(sorted({*self.state.shm, *found})))

    def _remove_sockets(self) -> None:
        for name in _SOCKETS:
            (self._run_dir / name).unlink(missing_ok=True)
        for path in self._run_dir.glob(_VLLM_SOCKETS):
            if path.is_socket():
                path.unlink(missing_ok=True)

    def _set(self, **changes: object) -> None:
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]  # names are checked by replace()
        self._changed(self.state)


class _Watch:
    """Clocks of one life: is it well, is it late, is it time to look at its shared memory.

    A download may take any time. It tells all the while how far it is, at last that it is done, and each such word begins
    the time for the start anew; one that falls silent hangs.
    """

    def __init__(self, child: Child, run_dir: Path, startup_timeout_s: float) -> None:
        self.child = child
        self.since = "its start"
        self._gate_state = run_dir / names.RUN_GATE_STATE
        self._download = run_dir / names.RUN_DOWNLOAD
        self._told_ns = _changed_ns(self._download)  # in an earlier life
        self._startup_timeout_s = startup_timeout_s
        self._deadline_s = time.monotonic() + startup_timeout_s
        self._well_since_s: float | None = None
        self._shm_due_s = 0.0

    def well_s(self) -> float | None:
        """How long the engine has been serving; None: it never did."""
        if self._well_since_s is None:
            self._look()
        return None if self._well_since_s is None else time.monotonic() - self._well_since_s

    def late(self) -> bool:
        """True: it should have been up by now."""
        if self.well_s() is not None:
            return False
        if (told_ns := _changed_ns(self._download)) != self._told_ns:
            self.since, self._told_ns = "its download", told_ns
            self._deadline_s = time.monotonic() + self._startup_timeout_s
        return time.monotonic() > self._deadline_s

    def shm_due(self) -> bool:
        now = time.monotonic()
        if now < self._shm_due_s:
            return False
        self._shm_due_s = now + (_SHM_STARTING_S if self._well_since_s is None else _SHM_S)
        return True

    def tick_s(self) -> float:
        return _STARTING_TICK_S if self._well_since_s is None else _TICK_S

    def _look(self) -> None:
        try:
            with GateState(self._gate_state) as state:
                pids = state.pids()
        except GateStateError:
            return  # somebody removed it: the next start makes a new one
        if pids:
            self._well_since_s = time.monotonic()


def _changed_ns(path: Path) -> int:
    """0: there is no such file."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def make_private(path: Path) -> None:
    """A directory for sockets and state: nobody else may look into it. Raises OSError."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.chmod(path, 0o700)
