"""One child process in a session of its own: terminal signals reach only us, and we stop it in order."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from prefixpool_cli.errors import PoolError


class Process:
    """A running child; its output goes to a log file. Owned by one LocalPool."""

    def __init__(self, name: str, log: Path, child: asyncio.subprocess.Process) -> None:
        self.name = name
        self.log = log
        self._child = child

    @classmethod
    async def start(
        cls, name: str, argv: Sequence[str], log: Path, env: Mapping[str, str], *, keeping: Sequence[int] = ()
    ) -> Process:
        """`keeping`: open files that stay open in it. Raises PoolError if it cannot even be executed."""
        # Should we be killed outright, the kernel ends the child, too (its own children are its business).
        setpriv = shutil.which("setpriv")
        guarded = [setpriv, "--pdeathsig", "TERM", "--", *argv] if setpriv else list(argv)
        try:
            with log.open("ab") as output:
                child = await asyncio.create_subprocess_exec(
                    *guarded,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **env},
                    start_new_session=True,
                    pass_fds=keeping,
                )
        except OSError as error:
            raise PoolError(f"{name} could not be started: {error}") from error
        return cls(name, log, child)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._child.returncode

    def send(self, signum: signal.Signals) -> None:
        """To the process alone; nothing happens if it has ended."""
        if self._child.returncode is None:
            self._child.send_signal(signum)

    def kill_group(self) -> None:
        """SIGKILL to it and to whatever of its session is left."""
        kill_group(self._child.pid)

    async def wait(self, timeout_s: float) -> bool:
        """Whether it ended in time."""
        try:
            await asyncio.wait_for(self._child.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def stop(self, timeout_s: float) -> bool:
        """SIGTERM, then SIGKILL of its group. Whether it ended by itself."""
        self.send(signal.SIGTERM)
        if await self.wait(timeout_s):
            return True
        self.kill_group()
        await self._child.wait()
        return False


def kill_group(pid: int) -> None:
    """SIGKILL to a process group that we started; one that is gone already is fine."""
    if pid <= 1:
        return
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
