"""One child in a process group of its own: start, end, what its end looked like. Needs the Reaper to learn of the end."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from prefixpool_agent import shm
from prefixpool_agent.supervisor.output import Output, output
from prefixpool_agent.supervisor.plan import AgentPlan

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_GROUP_POLL_S: Final = 0.02
_GROUP_GONE_S: Final = 5.0
_HELPERS_S: Final = 1.0  # Python's resource trackers unlink semaphores and shared memory once their process is gone
_REASON_CHARS: Final = 300
_log = logging.getLogger(__name__)
_libc: Final = ctypes.CDLL(None, use_errno=True)  # loaded before any fork: not safe to do in the child


class Reaper:
    """Waits for all children, adopted orphans too, as PID 1 must; tells the owners of those it knows."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[int]] = {}

    def watch(self, pid: int) -> asyncio.Future[int]:
        """Resolves to the wait status. Call in the same step as the start, before the loop can run `reap`."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[pid] = future
        return future

    def reap(self) -> None:
        """Handler of SIGCHLD."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            future = self._waiting.pop(pid, None)
            if future is not None and not future.done():
                future.set_result(status)


class Child:
    """A started process and its group."""

    def __init__(self, pid: int, exited: asyncio.Future[int], output: Output) -> None:
        self.pid = pid
        self.exited = exited
        self._output = output

    def signal(self, number: signal.Signals) -> None:
        """To the process itself; nothing happens if it is gone."""
        if not self.exited.done():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM, then SIGKILL of the group after `timeout_s`; returns when the whole group is gone."""
        self.signal(signal.SIGTERM)
        with suppress(TimeoutError):  # what SIGKILL is for
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self.exited)
                async with asyncio.timeout(_HELPERS_S):
                    await self._group_gone()
        await self.kill_group()

    async def kill_group(self) -> None:
        """SIGKILL whatever is left of the group and wait for it to be gone: memory and ports are free afterwards."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        try:
            async with asyncio.timeout(_GROUP_GONE_S):
                await asyncio.shield(self.exited)
                await self._group_gone()
        except TimeoutError:
            _log.error("processes of group %d survive SIGKILL: stuck in the kernel", self.pid)
        self._output.tail()  # its last words are passed on, too

    async def _group_gone(self) -> None:
        while shm.group_members(self.pid):  # noqa: ASYNC110 - grandchildren: nobody tells of their end
            await asyncio.sleep(_GROUP_POLL_S)

    def reason(self, *, what: str = "") -> str:
        """Why it ended, in words: exit code or signal, and the last line that it wrote."""
        how = what or (describe(self.exited.result()) if self.exited.done() else "still running")
        line = self._last_line()
        return f"{how}; last log line: {line}" if line else how

    def _last_line(self) -> str:
        lines = [line.strip() for line in self._output.tail().decode(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), "")[-_REASON_CHARS:]


def start(plan: AgentPlan, env: Mapping[str, str], reaper: Reaper) -> Child:
    """Raises OSError if the program cannot be started. The child dies with the supervisor."""
    out = output(plan.log)
    try:
        process = subprocess.Popen(
            plan.argv,
            env={**os.environ, **plan.env, **env},
            stdin=subprocess.DEVNULL,
            stdout=out.write_end,
            stderr=out.write_end,
            process_group=0,
            preexec_fn=_die_with_parent,
        )
    finally:
        os.close(out.write_end)
    process.returncode = 0  # the Reaper waits for it, not this object
    return Child(process.pid, reaper.watch(process.pid), out)


def adopt_orphans() -> None:
    """Grandchildren whose parents die become ours, also where we are not PID 1."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def describe(status: int) -> str:
    """A wait status in words."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"killed by {name}"


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
