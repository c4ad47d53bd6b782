"""What the supervisor tells the outside: `supervisor.json` and the answer of `status`."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path


class Phase(StrEnum):
    """What the supervisor does about the engine."""

    RUNNING = "running"
    BACKOFF = "backoff"
    STOPPED = "stopped"
    GAVE_UP = "gave_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """`epoch`, `started_ns`: nanoseconds since 1970. `reason`: why it last ended. `shm`: its files in /dev/shm."""

    pid: int | None = None
    epoch: int = 0
    phase: Phase = Phase.STOPPED
    restarts: int = 0
    reason: str = ""
    started_ns: int = 0
    shm: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentState:
    """The agent's process."""

    pid: int | None = None
    restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """All of it."""

    pid: int
    engine: EngineState = EngineState()
    agent: AgentState = AgentState()

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def write_state(state: State, path: Path) -> None:
    """Replace the file in one step. Raises OSError."""
    fresh = path.with_name(path.name + ".new")
    descriptor = os.open(fresh, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(state.to_json())
    fresh.replace(path)
