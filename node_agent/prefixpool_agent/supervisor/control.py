"""`supervisor.sock`: one JSON line in, one out, then the connection closes."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from prefixpool_agent.supervisor.engine import EngineKeeper
from prefixpool_agent.supervisor.state import State

_LINE_S: Final = 5.0
_MAX_LINE_BYTES: Final = 4096
_MAX_STOP_S: Final = 3600.0
_log = logging.getLogger(__name__)


class CommandError(Exception):
    """A command that is not understood; the message is the answer."""


class Control:
    """Serves commands, one at a time: a stop is over before the next command begins."""

    def __init__(self, engine: EngineKeeper, status: Callable[[], State]) -> None:
        self._engine = engine
        self._status = status
        self._turn = asyncio.Lock()

    async def serve(self, path: Path) -> asyncio.Server:
        """Raises OSError, also if a stale socket is in the way."""
        return await asyncio.start_unix_server(self._connection, path, limit=_MAX_LINE_BYTES)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_LINE_S):
                line = await reader.readline()
            writer.write((await self._answer(line)).encode() + b"\n")
            async with asyncio.timeout(_LINE_S):
                await writer.drain()
        except (OSError, TimeoutError, ValueError) as error:  # ValueError: a line beyond the limit
            _log.info("a command connection broke: %r", error)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, line: bytes) -> str:
        try:
            command = _parse(line)
            if command["cmd"] != "status":
                async with self._turn:
                    await self._obey(command)
        except CommandError as error:
            return json.dumps({"error": str(error)})
        return self._status().to_json()

    async def _obey(self, command: dict[str, Any]) -> None:
        match command["cmd"]:
            case "start_engine":
                self._engine.start()
            case "stop_engine":
                await self._engine.stop(_timeout_s(command))
            case "restart_engine":
                await self._engine.stop(_timeout_s(command))
                self._engine.start()
            case other:
                raise CommandError(f"unknown command {other!r}: status, start_engine, stop_engine, restart_engine")


def _parse(line: bytes) -> dict[str, Any]:
    try:
        command = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CommandError(f"not a line of JSON: {error}") from error
    if not isinstance(command, dict) or not isinstance(command.get("cmd"), str):
        raise CommandError('a command is an object with a "cmd"')
    return command


def _timeout_s(command: dict[str, Any]) -> float | None:
    timeout_s = command.get("timeout_s")
    if timeout_s is None:
        return None
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 <= timeout_s <= _MAX_STOP_S:
        raise CommandError(f"timeout_s={timeout_s!r}: seconds, 0 to {_MAX_STOP_S:g}")
    return float(timeout_s)
