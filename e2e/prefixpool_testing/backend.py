"""A scripted OpenAI- or Anthropic-speaking backend: does to its client exactly what a test says, byte for byte.

    async with Backend() as backend:
        backend.script(Fenced(), Stream(b"data: 1\n\n", gate, b"data: 2\n\n", then=END))

Each request takes the next scripted answer; when the script is empty, `default`. An `asyncio.Event` among the pieces of an
answer means: wait for it. What was asked, and whether the client went away before the end, is in `received`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from enum import Enum
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from prefixpool import names


class Then(Enum):
    """What follows the pieces of a stream."""

    END = "end"
    RESET = "reset"  # the connection breaks, as when the engine's process dies
    CLOSE = "close"  # orderly close without the terminating chunk
    HANG = "hang"  # nothing, until the client goes away


Piece = bytes | asyncio.Event


class Answer(NamedTuple):
    """One whole answer."""

    body: bytes = b"{}"
    status: int = 200
    headers: dict[str, str] = {"Content-Type": "application/json"}  # noqa: RUF012 -- never changed


class Stream:
    """Server-sent events, or any chunked body: each piece of bytes is one HTTP chunk."""

    def __init__(self, *pieces: Piece, then: Then = Then.END, headers: dict[str, str] | None = None) -> None:
        self.pieces = pieces
        self.then = then
        self.headers = {"Content-Type": "text/event-stream; charset=utf-8"} if headers is None else headers


class Raw:
    """Bytes on the socket, status line and framing included: for what no server library would send."""

    def __init__(self, *pieces: Piece, then: Then = Then.HANG, read_body: bool = True) -> None:
        self.pieces = pieces
        self.then = then
        self.read_body = read_body


class Broken(NamedTuple):
    """No answer at all. `read_body` False: the request's body stays unread."""

    then: Then = Then.RESET
    read_body: bool = True


Scripted = Answer | Stream | Raw | Broken


def fenced() -> Answer:
    """As the gate of a draining replica answers."""
    return Answer(b"fenced", 503, {names.H_FENCED: "1", "Content-Type": "text/plain"})


def busy() -> Answer:
    """As the gate of a full replica answers."""
    return Answer(b"busy", 503, {names.H_BUSY: "1", "Content-Type": "text/plain"})


def as_json(value: Any, status: int = 200) -> Answer:
    """An ordinary JSON answer."""
    return Answer(msgspec.json.encode(value), status)


def event(value: Any, name: str = "") -> bytes:
    """One server-sent event, as engines write it."""
    data = value if isinstance(value, bytes) else msgspec.json.encode(value)
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + data + b"\n\n"


class Received(NamedTuple):
    """One request, as it arrived."""

    method: str
    path: str  # with query, as on the wire
    headers: CIMultiDict[str]
    body: bytes
    gone: asyncio.Event  # the client went away before its answer was complete

    def json(self) -> Any:
        return msgspec.json.decode(self.body)


class Backend:
    """Listens on a free loopback port for as long as the `async with` lasts."""

    def __init__(self, default: Scripted | None = None) -> None:
        self.default: Scripted = default if default is not None else as_json({"ok": True})
        self.received: list[Received] = []
        self._script: deque[Scripted] = deque()

    def script(self, *answers: Scripted) -> None:
        """Add answers for the requests to come."""
        self._script.extend(answers)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def connections(self) -> int:
        return len(self._server.connections)

    async def __aenter__(self) -> Self:
        self._server = web.Server(self._handle, handler_cancellation=True, access_log=None, auto_decompress=False)
        self._listener = await asyncio.get_running_loop().create_server(self._server, "127.0.0.1", 0, backlog=1024)
        self._port: int = self._listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Refuse connections from now on, and break those there are, as when the process is killed."""
        self._listener.close()
        for connection in self._server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await self._server.shutdown(0.1)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        scripted = self._script.popleft() if self._script else self.default
        reads = scripted.read_body if isinstance(scripted, Broken | Raw) else True
        if not reads and request.transport is not None:
            request.transport.pause_reading()
        body = b"".join([piece async for piece in request.content.iter_any()]) if reads else b""
        received = Received(request.method, request.raw_path, CIMultiDict(request.headers), body, asyncio.Event())
        self.received.append(received)
        try:
            return await self._answer(request, scripted)
        except (asyncio.CancelledError, ConnectionError):
            received.gone.set()
            raise

    async def _answer(self, request: web.BaseRequest, scripted: Scripted) -> web.StreamResponse:
        match scripted:
            case Answer(body, status, headers):
                return web.Response(body=body, status=status, headers=headers)
            case Broken(then):
                await self._end(request, then)
                return web.Response()
            case Stream():
                response = web.StreamResponse(headers=scripted.headers)
                response.enable_chunked_encoding()
                await response.prepare(request)
                await self._write(scripted.pieces, response.write)
                await self._end(request, scripted.then)
                return response
            case Raw():
                await self._write(scripted.pieces, request.writer.write)
                await self._end(request, scripted.then)
                return web.Response()

    async def _write(self, pieces: Sequence[Piece], write: Any) -> None:
        for piece in pieces:
            if isinstance(piece, asyncio.Event):
                await piece.wait()
            else:
                await write(piece)

    async def _end(self, request: web.BaseRequest, then: Then) -> None:
        if then is Then.END or request.transport is None:
            return
        if then is Then.HANG:
            await asyncio.Event().wait()  # cancelled when the client goes away
        if then is Then.RESET:
            await asyncio.sleep(0.01)  # let what was written leave first: an abort would take it back
            request.transport.abort()
        else:
            request.transport.close()
        raise ConnectionResetError("as scripted")
