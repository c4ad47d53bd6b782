"""aiohttp's low-level server, with this router's manners: deadlines, errors in the client's dialect, no stack traces."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any, Final

from aiohttp import StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_exceptions import LineTooLong
from aiohttp.http_parser import RawRequestMessage

from prefixpool import names
from prefixpool.errors import Dialect, RequestError, error_body
from prefixpool_router.exact_writer import ExactWriter

_log = logging.getLogger(__name__)

_LINGER_S: Final = 1.0  # reading on after a refusal, so that a client that is still sending sees it
_PROBE_IDLE_S: Final = 30  # a client that vanished without a word is noticed within about this time plus 10 s


def refusal(error: RequestError, dialect: Dialect, request_id: str) -> web.Response:
    """A RequestError as the client's own API would say it."""
    response = web.Response(status=error.status, body=error_body(error, dialect), content_type="application/json")
    response.headers["Server"] = names.SERVER
    if request_id:
        response.headers[names.H_REQUEST_ID] = request_id
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


class ClientConnection(web.RequestHandler):
    """One client's connection."""

    __slots__ = ("_garbled", "_refused", "_unread_s")

    def __init__(self, manager: web.Server, *, unread_s: float, refused: Callable[[int], None], **options: Any) -> None:
        super().__init__(manager, **options)
        self._refused = refused
        self._unread_s = unread_s
        self._garbled = False

    def data_received(self, data: bytes) -> None:
        """What follows something that is no HTTP is dropped: the parser would make of each piece an error that quotes it."""
        if self._garbled:
            return
        super().data_received(data)
        self._garbled = bool(self._messages) and not isinstance(self._messages[-1][0], RawRequestMessage)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_IDLE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 3)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
            # The last resort against clients that never read: the kernel drops what they left unread for so long.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._unread_s * 1000))

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """What the HTTP parser refused. Its messages quote the client's bytes, so neither client nor log gets them."""
        if isinstance(exc, LineTooLong) or "Too many" in (message or ""):
            error = RequestError(431, "The request's head is too large.")
        elif status == 400:
            error = RequestError(400, "This is not a well-formed HTTP request.")
        else:
            error = RequestError(500, "The router failed.")
        _log.debug("Request refused by the HTTP parser", extra={"status": error.status, "error": type(exc).__name__})
        if request.writer.output_size > 0:
            raise ConnectionError("the answer had begun")
        self._refused(error.status)
        response = refusal(error, Dialect.OPENAI, "")
        response.force_close()
        return response


def _request(
    message: RawRequestMessage,
    payload: StreamReader,
    protocol: web.RequestHandler,
    writer: AbstractStreamWriter,
    task: asyncio.Task[None],
) -> web.BaseRequest:
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, ExactWriter(protocol, loop), task, loop)


class ClientServer(web.Server):
    """Makes a ClientConnection for each client; a client that goes away cancels its handler.

    `refused` hears the status of what was no HTTP, and so never reached the handler.
    """

    def __init__(self, handler: Any, *, idle_s: float, unread_s: float, refused: Callable[[int], None]) -> None:
        super().__init__(
            handler,
            request_factory=_request,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=idle_s,
            lingering_time=_LINGER_S,
            auto_decompress=False,
        )
        self._unread_s = unread_s
        self._refused = refused

    def __call__(self) -> ClientConnection:
        return ClientConnection(self, loop=self._loop, unread_s=self._unread_s, refused=self._refused, **self._kwargs)
