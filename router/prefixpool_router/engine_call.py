"""One request on one connection to an engine, on aiohttp's connections and parser.

aiohttp's session does the same for any server, with cookies, redirects, proxies and a task for each body: twice the work, a
sixth of all that the router does for a short request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Final, NamedTuple

import aiohttp
from aiohttp import hdrs
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.http import HttpProcessingError, RawResponseMessage
from multidict import CIMultiDict

from prefixpool.errors import RequestError
from prefixpool_router.exact_writer import ExactWriter
from prefixpool_router.failures import ResetError
from prefixpool_router.limits import is_plain

_HELD_BYTES: Final = 1 << 16  # at twice this much of an answer that its client does not take, the engine is held back
_MAX_FIELD_BYTES: Final = 1 << 16
_BODILESS: Final = frozenset({"GET", "HEAD", "OPTIONS"})  # without a body these say nothing of its length


class EngineRequest(NamedTuple):
    """What an engine is sent. A body that is not bytes can be sent once only; without Content-Length it goes in chunks."""

    method: str
    target: str  # path and query
    headers: CIMultiDict[str]
    body: bytes | AsyncIterator[bytes]


class EngineCall:
    """Owns its connection, and the task that sends a body which is still arriving."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending: asyncio.Task[None] | None = None

    async def ask(
        self, request: EngineRequest, *, host: str, target: str, last: bool
    ) -> tuple[RawResponseMessage, aiohttp.StreamReader]:
        """Send, and wait for the head of the answer. `last`: the connection is not kept. Raises ResetError."""
        protocol = self._connection.protocol
        assert protocol is not None  # nobody has closed it yet
        try:
            await self._send(protocol, request, host=host, target=target, last=last)
            message, content = await protocol.read()
            while HTTPStatus.CONTINUE <= message.code < HTTPStatus.OK and message.code != HTTPStatus.SWITCHING_PROTOCOLS:
                message, content = await protocol.read()
            if message.code < HTTPStatus.OK:
                raise ResetError(f"the engine changed protocols unasked, or speaks none: status {message.code}")
            if not is_plain(message.headers):
                raise ResetError("the engine encoded its answer for transfer, unasked")
        except (aiohttp.ClientError, HttpProcessingError, OSError) as error:
            self.abort()
            raise ResetError from error
        except BaseException:
            self.abort()
            raise
        content.on_eof(self._release)
        return message, content

    def abort(self) -> None:
        """Break the connection, unless it was given back: a mere close would first send what is left of the request."""
        if self._sending is not None:
            self._sending.cancel()
        if self._connection.transport is not None:
            self._connection.transport.abort()
        self._connection.close()

    def _release(self) -> None:
        """The answer is complete. If the request is not, what is left of it must not precede another one."""
        transport = self._connection.transport
        sent = self._sending is None or self._sending.done()
        if sent and transport is not None and not transport.get_write_buffer_size():
            self._connection.release()
        else:
            self.abort()

    async def _send(self, protocol: ResponseHandler, request: EngineRequest, *, host: str, target: str, last: bool) -> None:
        protocol.set_response_params(
            skip_payload=request.method == "HEAD",
            read_until_eof=True,
            auto_decompress=False,
            read_bufsize=_HELD_BYTES,
            max_line_size=_MAX_FIELD_BYTES,
            max_field_size=_MAX_FIELD_BYTES,
        )
        headers, body = CIMultiDict({hdrs.HOST: host}), request.body
        headers.extend(request.headers)
        if last:
            headers[hdrs.CONNECTION] = "close"
        writer = ExactWriter(protocol, asyncio.get_running_loop())
        if isinstance(body, bytes):
            if body or request.method not in _BODILESS:
                headers[hdrs.CONTENT_LENGTH] = str(len(body))
        elif hdrs.CONTENT_LENGTH not in headers:
            headers[hdrs.TRANSFER_ENCODING] = "chunked"
            writer.enable_chunking()
        await writer.write_headers(f"{request.method} {target} HTTP/1.1", headers)
        if isinstance(body, bytes):
            await writer.write(body, drain=False)  # with the head; it is in memory anyway
        else:
            writer.send_headers()
            self._sending = asyncio.create_task(self._pass_on(body, writer), name="request body")

    async def _pass_on(self, body: AsyncIterator[bytes], writer: ExactWriter) -> None:
        complete = False
        try:
            async for piece in body:
                await writer.write(piece)
            await writer.write_eof()
            complete = True
        except (RequestError, OSError):
            pass  # the exchange knows of the first, and the broken connection tells `ask`
        finally:
            if not complete:
                self.abort()
