"""Entry: `python -m prefixpool_agent.supervisor <run_dir>/worker.json`."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import logging
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from prefixpool import names
from prefixpool_agent.supervisor.agent import AgentKeeper
from prefixpool_agent.supervisor.control import Control
from prefixpool_agent.supervisor.engine import EngineKeeper, make_private
from prefixpool_agent.supervisor.guard import end_left_over, fork_guard
from prefixpool_agent.supervisor.log_files import keep_logs_small
from prefixpool_agent.supervisor.plan import Plan, PlanError, read_plan
from prefixpool_agent.supervisor.process import Reaper, adopt_orphans
from prefixpool_agent.supervisor.state import AgentState, EngineState, State, write_state

_LOCK: Final = "supervisor.lock"
_LOCK_S: Final = 3.0
_LOCK_POLL_S: Final = 0.05
_SOCKETS: Final = (names.RUN_NOTES_SOCK, names.RUN_SUPERVISOR_SOCK)
_log = logging.getLogger("prefixpool_agent.supervisor")


class Supervisor:
    """Wires keepers, control socket and state file; owns their order of start and stop."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._state = State(pid=os.getpid())
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Until SIGTERM, SIGINT or SIGHUP; everything is gone when it returns."""
        loop = asyncio.get_running_loop()
        reaper = Reaper()
        adopt_orphans()
        loop.add_signal_handler(signal.SIGCHLD, reaper.reap)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._stop.set)
        run_dir = self._plan.run_dir
        self._clear_away()
        engine = EngineKeeper(self._plan.engine, run_dir, reaper, self._engine_changed)
        agent = AgentKeeper(self._plan.agent, reaper, self._agent_changed)
        server = await Control(engine, lambda: self._state).serve(run_dir / names.RUN_SUPERVISOR_SOCK)
        logs = [Path(log) for log in (self._plan.engine.log, self._plan.agent.log) if log]
        tasks = [loop.create_task(work) for work in (engine.run(), keep_logs_small(logs))]
        agent_task = loop.create_task(agent.run())
        stop = loop.create_task(self._stop.wait())
        try:
            # A keeper ends only by a bug; then everything is stopped and the error shows.
            await asyncio.wait([*tasks, agent_task, stop], return_when=asyncio.FIRST_COMPLETED)
            await engine.stop()
        finally:
            server.close()
            for task in (*tasks, agent_task, stop):
                task.cancel()
            results = await asyncio.gather(*tasks, agent_task, return_exceptions=True)
            self._clear_away()
        for result in results:
            if isinstance(result, Exception):
                raise result

    def _clear_away(self) -> None:
        for name in _SOCKETS:
            (self._plan.run_dir / name).unlink(missing_ok=True)

    def _engine_changed(self, engine: EngineState) -> None:
        self._publish(replace(self._state, engine=engine))

    def _agent_changed(self, agent: AgentState) -> None:
        self._publish(replace(self._state, agent=agent))

    def _publish(self, state: State) -> None:
        if state == self._state:
            return
        self._state = state
        try:
            write_state(state, self._plan.run_dir / names.RUN_SUPERVISOR_STATE)
        except OSError as error:
            _log.warning("state file not written: %s", error)  # `status` still tells it; a full disk must not stop engines


def _lock(path: Path) -> None:
    """One supervisor for each directory. Raises BlockingIOError. Waits for the guard of a killed one, which cleans up."""
    lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    deadline_s = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(_LOCK_POLL_S)  # noqa: TID251 - no event loop yet
        else:
            return


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 after a clean stop, 2 if it could not begin."""
    parser = argparse.ArgumentParser(prog="prefixpool_agent.supervisor", description=__doc__)
    parser.add_argument("plan", type=Path, help="worker.json, as prefixpool-worker writes it")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s supervisor %(levelname)s %(message)s", stream=sys.stderr)
    try:
        plan = _begin(options.plan)
    except BlockingIOError:
        _log.error("another supervisor runs in %s", options.plan.parent)
        return 2
    except (PlanError, OSError) as error:
        _log.error("%s", error)
        return 2
    asyncio.run(Supervisor(plan).run())
    return 0


def _begin(path: Path) -> Plan:
    """Read the plan, take the directory, end what an earlier supervisor left. Raises PlanError, OSError."""
    plan = read_plan(path)
    make_private(plan.run_dir)
    _lock(plan.run_dir / _LOCK)
    state_file = plan.run_dir / names.RUN_SUPERVISOR_STATE
    end_left_over(state_file)
    fork_guard(state_file)
    return plan


if __name__ == "__main__":
    sys.exit(main())
