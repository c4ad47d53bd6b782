"""Server of the unix socket on which the gates report what requests they let through (core `note.py`).

Each API server process of the engine keeps one connection and a ring of recent notes, and begins each connection with the
whole ring, so notes come twice; they are told apart by their ids. Notes of another engine start are dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from pathlib import Path
from typing import Final, Protocol

import msgspec

from prefixpool import note as notes
from prefixpool.errors import WireError
from prefixpool_agent.defect import log_defect
from prefixpool_agent.pacing import Pace

SEEN_IDS: Final = 8 * notes.RING_NOTES  # rings of eight API server processes
HELLO_S: Final = 5.0
MAX_GATES: Final = 128
READ_BUFFER_BYTES: Final = 1 << 20
WRITE_BUFFER_BYTES: Final = 1 << 16  # a gate that does not read its commands is cut off

log = logging.getLogger(__name__)


class NoteSink(Protocol):
    """Who learns of requests. Called from the loop, in the order of one gate."""

    def arrival(self, note: notes.Arrival) -> None:
        """A request passed the gate."""
        ...

    def end(self, note: notes.End) -> None:
        """An answer is over."""
        ...

    def cache_reset(self, note: notes.CacheReset) -> None:
        """The engine's prefix cache was reset."""
        ...

    def hello(self, hello: notes.GateHello) -> None:
        """A gate connected. It may belong to another epoch."""
        ...

    def note_bad(self) -> None:
        """A frame could not be read; its connection is closed."""
        ...


class Notes:
    """`begin()` says which epoch counts; until then nothing is taken."""

    def __init__(self, path: Path, sink: NoteSink) -> None:
        self._path = path
        self._sink = sink
        self._epoch = 0
        self._gates: dict[asyncio.StreamWriter, notes.GateHello] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._seen: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._server: asyncio.Server | None = None
        self._behind: set[asyncio.StreamWriter] = set()  # gates whose ring is still coming
        self._expected = 1  # gates that must come back
        self.caught_up = asyncio.Event()  # every gate has told all it remembers of this engine start

    @property
    def gates(self) -> int:
        """API server processes that are connected."""
        return len(self._gates)

    async def start(self) -> None:
        """Listen. A socket left by an agent that died is replaced."""
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._connected, self._path, limit=READ_BUFFER_BYTES)
        self._path.chmod(0o600)

    async def stop(self) -> None:
        """Close everything; gates keep their rings and try again."""
        if self._server is not None:
            self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._path.unlink(missing_ok=True)

    def begin(self, epoch: int) -> None:
        """Take notes of this engine start, beginning with what its gates remember.

        Gates that are connected must come back: each begins a connection with its whole ring, whereas notes that are under
        way now would come without those before them.
        """
        self._epoch = epoch
        self.caught_up.clear()
        self._expected = max(1, len(self._gates))
        self._seen.clear()
        for writer in self._gates:
            writer.close()
        self._gates.clear()

    def send(self, command: notes.ToGate) -> int:
        """To every gate of the present epoch; returns to how many."""
        ours = [writer for writer, hello in self._gates.items() if hello.epoch == self._epoch]
        for writer in ours:
            self._write(writer, command)
        return len(ours)

    def _write(self, writer: asyncio.StreamWriter, command: notes.ToGate) -> None:
        if writer.transport.get_write_buffer_size() > WRITE_BUFFER_BYTES:
            writer.transport.abort()
        elif not writer.is_closing():  # uvloop raises for a closed transport
            writer.write(notes.frame(command))

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= MAX_GATES:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._connection(reader, writer), name="gate")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._serve(reader, writer)
        except (WireError, msgspec.MsgspecError) as error:
            log.warning("gate disconnected: a note could not be read", extra={"error": str(error)})
            self._sink.note_bad()
        except (asyncio.IncompleteReadError, OSError, TimeoutError):
            log.debug("gate disconnected")
        finally:
            self._gates.pop(writer, None)
            self._behind.discard(writer)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(HELLO_S):
            hello = notes.decode_from_gate(await _frame(reader))
        if not isinstance(hello, notes.GateHello) or hello.version != notes.VERSION:
            raise WireError("the first frame is not a greeting of this version")
        self._gates[writer] = hello
        self._behind.add(writer)
        self._sink.hello(hello)
        pace, told = Pace(), 0
        while writer in self._gates:
            if told >= hello.ring:
                self._up_to_date(writer, hello)
            message = notes.decode_from_gate(await _frame(reader))
            told += 1
            if writer in self._gates and hello.epoch == self._epoch:
                self._digest(message, hello.pid)
            await pace.breathe()

    def _up_to_date(self, writer: asyncio.StreamWriter, hello: notes.GateHello) -> None:
        self._behind.discard(writer)
        if hello.epoch == self._epoch and not self._behind and len(self._gates) >= self._expected:
            self.caught_up.set()

    def _digest(self, message: notes.FromGate, pid: int) -> None:
        try:
            self._take(message, pid)
        except Exception as error:  # noqa: BLE001  it would come again with every ring, and must not cost the other notes
            log_defect(log, "a note could not be digested", error)
            self._sink.note_bad()

    def _take(self, message: notes.FromGate, pid: int) -> None:
        match message:
            case notes.Arrival():
                if self._is_new("arrival", message.id):
                    self._sink.arrival(message)
            case notes.End():
                if self._is_new("end", message.id):
                    self._sink.end(message)
            case notes.CacheReset():
                if self._is_new("reset", f"{pid}:{message.at_s}"):
                    self._sink.cache_reset(message)
            case notes.GateHello() | notes.Counts():
                pass  # counts are read from the shared state, which is never late

    def _is_new(self, kind: str, id_: str) -> bool:
        key = (kind, id_)
        if key in self._seen:
            return False
        self._seen[key] = None
        if len(self._seen) > 2 * SEEN_IDS:
            self._seen.popitem(last=False)
        return True


async def _frame(reader: asyncio.StreamReader) -> bytes:
    """One payload. Raises WireError for one that is too long, IncompleteReadError at the end."""
    (length,) = notes.LENGTH.unpack(await reader.readexactly(notes.LENGTH.size))
    if length > notes.MAX_FRAME_BYTES:
        raise WireError(f"a note of {length} bytes; at most {notes.MAX_FRAME_BYTES} are sent")
    return await reader.readexactly(length)
