"""Ends engine and agent when the supervisor itself was killed. A forked child that waits for a pipe to close.

The kernel can kill a direct child with its parent (PR_SET_PDEATHSIG), but vLLM's engine core and workers are grandchildren:
measured, they live on and keep gigabytes. In a container the supervisor is PID 1 and takes everything with it; there is no
guard then.
"""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from prefixpool_agent import shm

_IGNORED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_GONE_S: Final = 5.0
_POLL_S: Final = 0.02


def fork_guard(state_file: Path) -> None:
    """Call before there is an event loop or a thread. Returns in the supervisor only."""
    if os.getpid() == 1:
        return
    reading, writing = os.pipe()
    supervisor = os.getpid()
    if os.fork():
        os.close(reading)  # the writing end stays open for as long as the supervisor lives, and no child inherits it
        return
    os.close(writing)
    try:
        _guard(reading, supervisor, state_file)
    finally:
        os._exit(0)  # never into the supervisor's code


def _guard(reading: int, supervisor: int, state_file: Path) -> None:
    os.setsid()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    os.read(reading, 1)  # returns when the supervisor is gone
    state = _state(state_file)
    if state.get("pid") == supervisor:
        end_groups(state)


def end_left_over(state_file: Path) -> None:
    """What neither supervisor nor guard could end, from the state file of an earlier run.

    A process id may be another's by now, so only a group that maps shared memory recorded for that engine is touched.
    """
    state = _state(state_file)
    engine = state.get("engine", {})
    pid = engine.get("pid")
    if isinstance(pid, int) and shm.mapped_files(shm.group_members(pid)) & set(engine.get("shm", ())):
        end_groups({"engine": engine})
    else:
        shm.remove(_names(engine))


def left_over_bytes(state_file: Path) -> int:
    """Of shared memory, held by nobody any more: `end_left_over` frees them."""
    return shm.unmapped_bytes(_names(_state(state_file).get("engine", {})))


def end_groups(state: dict[str, Any]) -> None:
    """SIGKILL the groups of engine and agent; remove the engine's shared memory."""
    engine = state.get("engine", {})
    groups = [pid for part in ("engine", "agent") if isinstance(pid := state.get(part, {}).get("pid"), int)]
    names = _names(engine) | shm.mapped_files(shm.group_members(groups[0]) if groups else [])
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    deadline_s = time.monotonic() + _GONE_S
    while any(shm.group_members(group) for group in groups) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)  # noqa: TID251 - no event loop here
    shm.remove(names)


def _names(engine: dict[str, Any]) -> set[str]:
    return {name for name in engine.get("shm", ()) if isinstance(name, str) and "/" not in name}


def _state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}  # none was written
    return state if isinstance(state, dict) else {}
