"""Notes on their way to the agent: a bounded ring, and the one task that writes it to the socket.

A request only appends to the ring. Whether the agent is there, slow or dead is the writer task's business: it connects for
ever, and when it cannot keep up the oldest notes fall out and are counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from prefixpool import note
from prefixpool.errors import WireError

TICK_S: Final = 1.0
_CONNECT_S: Final = 2.0
_STALL_S: Final = 30.0  # an agent that reads nothing for so long is reconnected to
_BACKOFF_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0)
_BATCH_BYTES: Final = 256 << 10
_MAX_COMMAND_BYTES: Final = 4096
_log = logging.getLogger(__name__)


class NoteRing:
    """Recent notes, framed. What was not sent yet is the part behind the cursor."""

    def __init__(self, max_notes: int = note.RING_NOTES, max_bytes: int = note.RING_BYTES) -> None:
        self._max_notes = max_notes
        self._max_bytes = max_bytes
        self._frames: deque[bytes] = deque()
        self._bytes = 0
        self._cursor = 0  # index of the next frame to send
        self.dropped = 0  # frames that fell out unsent

    def __len__(self) -> int:
        return len(self._frames)

    def append(self, frame: bytes) -> None:
        """Add a note; the oldest make room."""
        self._frames.append(frame)
        self._bytes += len(frame)
        while len(self._frames) > self._max_notes or self._bytes > self._max_bytes:
            self._bytes -= len(self._frames.popleft())
            if self._cursor:
                self._cursor -= 1
            else:
                self.dropped += 1

    def take(self, max_bytes: int = _BATCH_BYTES) -> bytes:
        """The next unsent frames, at least one if there is any, joined; moves the cursor behind them."""
        batch: list[bytes] = []
        size = 0
        while self._cursor < len(self._frames) and size < max_bytes:
            frame = self._frames[self._cursor]
            self._cursor += 1
            batch.append(frame)
            size += len(frame)
        return b"".join(batch)

    def rewind(self) -> None:
        """Send everything that is still held again."""
        self._cursor = 0


class NoteLink:
    """Owns the connection to the agent. `put` is the only call made by requests."""

    def __init__(
        self,
        path: Path,
        *,
        hello: Callable[[int], note.GateHello],
        on_command: Callable[[note.ToGate], None],
        on_tick: Callable[[], None],
        ring: NoteRing | None = None,
    ) -> None:
        """`hello` gets the number of dropped notes; `on_tick` runs about once a second while connected."""
        self._path = path
        self._hello = hello
        self._on_command = on_command
        self._on_tick = on_tick
        self._ring = ring if ring is not None else NoteRing()
        self._wake = asyncio.Event()

    def put(self, message: note.FromGate) -> None:
        """Queue a note; never waits, never fails."""
        self._ring.append(note.frame(message))
        self._wake.set()

    async def run(self) -> None:
        """Connect, send, receive commands; for ever. End by cancelling."""
        failures = 0
        while True:
            try:
                async with asyncio.timeout(_CONNECT_S):
                    reader, writer = await asyncio.open_unix_connection(str(self._path))
            except (OSError, TimeoutError):
                await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
                failures += 1
                continue
            failures = 0
            try:
                await self._serve(reader, writer)
            finally:
                writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send(writer))
                tasks.create_task(self._receive(reader))
        except* (OSError, TimeoutError, EOFError, RuntimeError) as lost:  # uvloop: RuntimeError for a closed transport
            _log.info("agent gone: %s", lost.exceptions[0])
        except* WireError as nonsense:
            _log.warning("agent speaks nonsense, reconnecting: %s", nonsense.exceptions[0])

    async def _send(self, writer: asyncio.StreamWriter) -> None:
        # The agent at the other end is another one, or lost what was in the old socket: an end whose arrival it never saw
        # would be worthless, so everything comes again in order. It takes each note once.
        self._ring.rewind()
        writer.write(note.frame(msgspec.structs.replace(self._hello(self._ring.dropped), ring=len(self._ring))))
        loop = asyncio.get_running_loop()
        due_s = loop.time() + TICK_S
        while True:
            if loop.time() >= due_s:  # also when notes never cease
                self._on_tick()
                due_s = loop.time() + TICK_S
            batch = self._ring.take()
            if batch:
                writer.write(batch)
                async with asyncio.timeout(_STALL_S):
                    await writer.drain()
            else:
                self._wake.clear()
                with suppress(TimeoutError):  # time to tick
                    async with asyncio.timeout_at(due_s):
                        await self._wake.wait()

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        # No deadline on the wait: silence is the normal state of this direction, and a dead agent closes the socket.
        while True:
            header = await reader.readexactly(note.LENGTH.size)
            (length,) = note.LENGTH.unpack(header)
            if length > _MAX_COMMAND_BYTES:
                raise WireError(f"a command of {length} bytes")
            async with asyncio.timeout(_STALL_S):
                payload = await reader.readexactly(length)
            try:
                command = note.decode_to_gate(payload)
            except msgspec.DecodeError as error:
                raise WireError(str(error)) from error
            if isinstance(command, note.Resend):
                self._ring.rewind()
                self._wake.set()
            else:
                self._on_command(command)
