"""The processes of one cluster: each with a log file, all ended with the cluster, whatever happens to their starter."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from prefixpool_testing.cluster.errors import ClusterError

_STOP_S: Final = 5.0  # an API server with open watches would take a minute
_POLL_S: Final = 0.05
_TAIL_BYTES: Final = 3000
# Of what an API server computes here, a fifth was collecting garbage. Memory is there, and cores are few.
_ENVIRONMENT: Final = {"GOGC": "400"}


class Programs:
    """Logs are in `folder`. `prefix` stands before each command: how it gets into the namespaces of a node."""

    def __init__(self, folder: Path, prefix: Sequence[str] = ()) -> None:
        self.folder = folder
        self._prefix = tuple(prefix)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, name: str, argv: Sequence[str | Path], env: Mapping[str, str] | None = None) -> None:
        """Output is appended to NAME.log. The kernel ends it when the thread that started it ends, even by SIGKILL."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", *self._prefix, *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **_ENVIRONMENT, **(env or {})},
                start_new_session=True,
            )

    def until(self, name: str, ready: Callable[[], bool], within_s: float) -> None:
        """Until `ready`. Raises ClusterError with the end of the log if the program dies or takes longer."""
        end_s = time.monotonic() + within_s
        while not ready():
            if (code := self._running[name].poll()) is not None:
                raise ClusterError(f"{name} ended with {code}:\n{self.tail(name)}")
            if time.monotonic() > end_s:
                raise ClusterError(f"{name} is not ready after {within_s:g} s:\n{self.tail(name)}")
            time.sleep(_POLL_S)  # noqa: TID251 -- nothing of it announces that it is ready

    def tail(self, name: str) -> str:
        """End of its log."""
        return (self.folder / f"{name}.log").read_bytes()[-_TAIL_BYTES:].decode(errors="replace")

    def pids(self) -> list[int]:
        """Of what was started and not stopped."""
        return [program.pid for program in self._running.values()]

    def stop(self, name: str) -> None:
        """SIGTERM to its whole session, SIGKILL if that doesn't end it. One that doesn't run is fine."""
        if (program := self._running.get(name)) is None:
            return
        _signal(program, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            program.wait(_STOP_S)
        self.kill(name)

    def kill(self, name: str) -> None:
        """SIGKILL to its whole session."""
        program = self._running.pop(name)
        _signal(program, signal.SIGKILL)
        program.wait(_STOP_S)

    def signal(self, name: str, signum: signal.Signals) -> None:
        """To its whole session: SIGSTOP and SIGCONT, say."""
        _signal(self._running[name], signum)

    def pid(self, name: str) -> int:
        """Of the program itself: `setpriv` became it."""
        return self._running[name].pid

    def exit_status(self, name: str) -> int | None:
        """None while it runs."""
        return self._running[name].poll()

    def stop_all(self) -> None:
        """At once: nothing of a cluster outlives it."""
        for name in list(self._running):
            self.kill(name)


def _signal(program: subprocess.Popen[bytes], signum: signal.Signals) -> None:
    """To the session that it leads, which may outlive it."""
    with suppress(ProcessLookupError):
        os.killpg(program.pid, signum)
