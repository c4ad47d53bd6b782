"""One connection to an engine, carrying one request at a time."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Final, cast

from prefixpool_router.engine_http import AnswerParser, EngineRequest, Head
from prefixpool_router.failures import ResetError, UnansweredError

_HIGH_BYTES: Final = 1 << 17  # of an answer that its client does not take; then the engine is held back
_LOW_BYTES: Final = 1 << 16
# A peer whose machine is gone answers nothing at all; the kernel finds out in about this time, whatever waits on the socket.
_DEAD_PEER_S: Final = 10


class EngineAnswer:
    """An answer as it arrives. Reading it to its end gives the connection back; `close` before that breaks it."""

    def __init__(self, connection: EngineConnection, method: str) -> None:
        self._connection: EngineConnection | None = connection
        self._parser = AnswerParser(method)
        self._chunks: deque[bytes] = deque()
        self._held = 0
        self._failure: UnansweredError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._upload: asyncio.Task[None] | None = None

    @property
    def head(self) -> Head:
        """Once `wait_head` has returned."""
        assert self._parser.head is not None
        return self._parser.head

    async def wait_head(self) -> None:
        """Raises ResetError, or what `fail` was given."""
        while self._parser.head is None:
            await self._wait()

    async def next(self) -> bytes:
        """One HTTP chunk, or what there is of a body without chunks; b"" at the end. Cancelling it loses nothing.

        Raises ResetError, or what `fail` was given, once all that came before is read.
        """
        while not self._chunks:
            if self._parser.complete:
                return b""
            await self._wait()
        chunk = self._chunks.popleft()
        self._held -= len(chunk)
        if self._held <= _LOW_BYTES and self._connection is not None:
            self._connection.resume()
        return chunk

    def fail(self, failure: UnansweredError) -> None:
        """End the waiting, and the connection."""
        if self._failure is None and not self._parser.complete:
            self._failure = failure
            self._wake()
        self.close()

    def close(self) -> None:
        """Break the connection, unless the answer is complete: the engine stops working on it."""
        connection, self._connection = self._connection, None
        if self._upload is not None:
            self._upload.cancel()
        if connection is not None:
            connection.abort()

    async def _wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # For the connection:

    def upload_by(self, task: asyncio.Task[None]) -> None:
        self._upload = task

    def feed(self, data: bytes) -> bool:
        """True once the answer is complete. Raises ResetError."""
        for chunk in self._parser.feed(data):
            self._chunks.append(chunk)
            self._held += len(chunk)
        if self._held > _HIGH_BYTES and self._connection is not None:
            self._connection.pause()
        self._wake()
        return self._parser.complete

    def feed_end(self) -> None:
        try:
            self._parser.end()
        except ResetError as failure:
            self.fail(failure)
        else:
            self._wake()

    def release(self) -> bool:
        """The connection takes itself back; True if it may carry another request."""
        self._connection = None
        if self._upload is not None and not self._upload.done():
            self._upload.cancel()  # it has answered without wanting to know the rest
            return False
        return self._parser.reusable


class EngineConnection(asyncio.Protocol):
    """`on_idle` gets it back when an answer was complete and the connection can be used again."""

    def __init__(self, on_idle: Callable[[EngineConnection], None]) -> None:
        self._on_idle = on_idle
        self._transport: asyncio.Transport | None = None
        self._answer: EngineAnswer | None = None
        self._paused = False
        self._writable = asyncio.Event()
        self._writable.set()
        self.idle_since_s = 0.0

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, request: EngineRequest, head: bytes) -> EngineAnswer:
        """Begin a request. Everything that goes wrong from here on shows in its answer."""
        answer = self._answer = EngineAnswer(self, request.method)
        body = request.body
        if self._transport is None or self._transport.is_closing():  # uvloop raises on a write then
            answer.fail(ResetError("the connection was closed already"))
        elif not isinstance(body, bytes):
            self._transport.write(head)
            upload = self._upload(answer, body, chunked=request.length is None)
            answer.upload_by(asyncio.get_running_loop().create_task(upload))
        elif len(body) < _LOW_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)
        return answer

    async def _upload(self, answer: EngineAnswer, body: AsyncIterator[bytes], *, chunked: bool) -> None:
        try:
            async for piece in body:
                await self._writable.wait()
                if self._transport is None or self._transport.is_closing():
                    return
                self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            if chunked and self._transport is not None and not self._transport.is_closing():
                self._transport.write(b"0\r\n\r\n")
        except Exception as error:  # noqa: BLE001 -- the task's boundary: whatever broke the client's body breaks the attempt
            failure = ResetError("the client's body broke off")
            failure.__cause__ = error
            answer.fail(failure)

    def pause(self) -> None:
        if not self._paused and self._transport is not None and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and self._transport is not None and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        self._answer = None
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            _watch_peer(sock)

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            self.abort()  # an idle connection must be silent
            return
        try:
            complete = answer.feed(data)
        except ResetError as failure:
            answer.fail(failure)
            return
        if complete:
            self._take_back(answer)

    def _take_back(self, answer: EngineAnswer) -> None:
        self._answer = None
        reusable = answer.release()
        self.resume()
        if reusable and self.usable:
            self._on_idle(self)
        else:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._writable.set()
        answer, self._answer = self._answer, None
        if answer is None:
            return
        if exc is None:
            answer.feed_end()
        else:
            answer.fail(ResetError("the connection to the engine broke"))

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()


def _watch_peer(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _DEAD_PEER_S // 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_PEER_S * 1000)
