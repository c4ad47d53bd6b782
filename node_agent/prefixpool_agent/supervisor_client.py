"""The agent's view of its supervisor: the state file, and commands over the unix socket (ARCHITECTURE.md, "Worker")."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from prefixpool import names
from prefixpool.errors import PrefixpoolError

ANSWER_S: Final = 5.0  # beyond what a command itself may take
KILL_AFTER_S: Final = 5.0  # the supervisor kills the engine's group this long after its own deadline
MAX_LINE_BYTES: Final = 1 << 20


class SupervisorError(PrefixpoolError):
    """The supervisor does not answer, or refuses."""


class EnginePhase(StrEnum):
    """What the supervisor does about the engine's process."""

    RUNNING = "running"
    BACKOFF = "backoff"
    STOPPED = "stopped"
    GAVE_UP = "gave_up"


class EngineProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One engine start. `started_ns`: since 1970."""

    pid: int | None = None
    epoch: int = 0
    phase: EnginePhase = EnginePhase.STOPPED
    restarts: int = 0
    reason: str | None = None
    started_ns: int = 0


class AgentProcess(msgspec.Struct, frozen=True, kw_only=True):
    """This process, as the supervisor counts it."""

    pid: int | None = None
    restarts: int = 0


class SupervisorState(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of `supervisor.json`, and the answer of `status`."""

    pid: int
    engine: EngineProcess
    agent: AgentProcess = AgentProcess()


class _Refusal(msgspec.Struct, frozen=True):
    error: str = ""


_state = msgspec.json.Decoder(SupervisorState)
_refusal = msgspec.json.Decoder(_Refusal)


def read_state(run_dir: Path) -> SupervisorState | None:
    """The state file; None if the supervisor has not written one yet. Raises SupervisorError if it is not what we know."""
    path = run_dir / names.RUN_SUPERVISOR_STATE
    try:
        return _state.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise SupervisorError(f"{path.name}: {error}") from error


class SupervisorClient:
    """Commands; each opens a connection of its own, because they are rare and one may take a minute."""

    def __init__(self, run_dir: Path) -> None:
        self._socket = run_dir / names.RUN_SUPERVISOR_SOCK

    async def stop_engine(self, timeout_s: float) -> None:
        """SIGTERM, later SIGKILL of the group; returns when the engine is gone. Raises SupervisorError."""
        await self._command({"cmd": "stop_engine", "timeout_s": timeout_s}, timeout_s + KILL_AFTER_S + ANSWER_S)

    async def start_engine(self) -> None:
        """Start an engine that was stopped. Raises SupervisorError."""
        await self._command({"cmd": "start_engine"}, ANSWER_S)

    async def _command(self, command: dict[str, object], deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                answer = await self._exchange(msgspec.json.encode(command) + b"\n")
            refusal = _refusal.decode(answer).error
        except TimeoutError as error:
            raise SupervisorError(f"supervisor: no answer to {command['cmd']} within {deadline_s:g} s") from error
        except (OSError, ValueError) as error:  # msgspec.DecodeError is a ValueError
            raise SupervisorError(f"supervisor: {command['cmd']}: {error}") from error
        if refusal:
            raise SupervisorError(f"supervisor: {command['cmd']}: {refusal}")

    async def _exchange(self, line: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(self._socket, limit=MAX_LINE_BYTES)
        try:
            writer.write(line)
            await writer.drain()
            return await reader.readline()
        finally:
            writer.close()
