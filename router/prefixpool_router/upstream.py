"""HTTP to all engines: aiohttp's client, and its failures in the words that retries are decided by."""

from __future__ import annotations

import asyncio
import functools
import io
import socket
from collections.abc import AsyncIterator
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any, Final, NamedTuple

import aiohttp
from aiohttp.connector import Connection
from aiohttp.tracing import Trace
from multidict import CIMultiDict
from yarl import URL

from prefixpool_router.engine_answer import EngineAnswer
from prefixpool_router.failures import RefusedError, ResetError

# Engines drop idle connections after 5 s (uvicorn's default); ours must go first, or a request meets a closing connection.
_KEEPALIVE_S: Final = 4.0
_RACE_S: Final = 1.0  # a connection that breaks later than this broke over its request
_HELD_BYTES: Final = 1 << 16  # at twice this much of an answer that its client does not take, the engine is held back
_MAX_FIELD_BYTES: Final = 1 << 16
_SENT_AT_ONCE_BYTES: Final = 1 << 20  # aiohttp wants longer bodies as files, which it sends in pieces
# A peer whose machine is gone answers nothing at all; the kernel finds out in about this time, whatever waits on the socket.
_DEAD_PEER_S: Final = 10


class EngineRequest(NamedTuple):
    """What an engine is sent. A body that is not bytes can be sent once only; without Content-Length it goes in chunks."""

    method: str
    target: str  # path and query
    headers: CIMultiDict[str]
    body: bytes | AsyncIterator[bytes]


class _Attempt:
    """Whether a request had to make its connection: aiohttp does not tell, and only a kept one can have been stale."""

    __slots__ = ("dialled",)

    def __init__(self) -> None:
        self.dialled = False


_attempt: ContextVar[_Attempt] = ContextVar("attempt")


class _Connector(aiohttp.TCPConnector):
    """Drops kept connections that spoke unasked: aiohttp would take that for the answer to the next request on them."""

    async def connect(self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout) -> Connection:
        while True:
            connection = await super().connect(req, traces, timeout)
            silent = connection.protocol is not None and not connection.protocol.should_close
            if silent or _attempt.get().dialled:
                return connection
            connection.close()


class Upstream:
    """Owns the connections; make, use and `close` it in one loop. `connect_s`: deadline to reach an engine."""

    def __init__(self, *, connect_s: float) -> None:
        self._session = _session(connect_s, force_close=False)
        self._fresh = _session(connect_s, force_close=True)  # one new connection for each request

    async def send(self, engine_url: str, request: EngineRequest) -> EngineAnswer:
        """Begin a request and wait for the head of its answer. Raises RefusedError or ResetError; has no deadline.

        A kept connection may be closed by its engine in the very moment of its use; such a request is sent once more to the
        same engine, on a new connection.
        """
        attempt = _Attempt()
        _attempt.set(attempt)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            return await _ask(self._session, engine_url, request)
        except ResetError:
            late = loop.time() - began_s > _RACE_S
            if attempt.dialled or late or not isinstance(request.body, bytes):
                raise
        try:
            return await _ask(self._fresh, engine_url, request)
        except RefusedError as error:  # it was there a moment ago: it may have died of this very request
            raise ResetError("the engine broke the connection and is gone") from error

    async def close(self) -> None:
        """Breaks all connections."""
        await self._session.close()
        await self._fresh.close()


async def _ask(session: aiohttp.ClientSession, engine_url: str, request: EngineRequest) -> EngineAnswer:
    url = _url(engine_url, request.target)
    try:
        response = await session.request(
            request.method, url, headers=request.headers, data=_payload(request.body), allow_redirects=False
        )
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise RefusedError from error
    except (aiohttp.ClientError, OSError) as error:
        raise ResetError from error
    if response.status == HTTPStatus.SWITCHING_PROTOCOLS:
        response.close()
        raise ResetError("the engine changed protocols unasked")
    return EngineAnswer(response)


def _payload(body: bytes | AsyncIterator[bytes]) -> Any:
    if not isinstance(body, bytes):
        return body
    if not body:
        return None
    return aiohttp.BytesPayload(body) if len(body) < _SENT_AT_ONCE_BYTES else io.BytesIO(body)


@functools.lru_cache(maxsize=512)
def _url(engine_url: str, target: str) -> URL:
    """Memoised, because few differ and parsing costs much."""
    try:
        url = URL(engine_url + target, encoded=True)
        usable = url.scheme in ("http", "https") and url.host is not None and url.port is not None
    except ValueError as error:  # what its parts say is found out when they are asked for
        raise RefusedError("not the address of an engine") from error
    if not usable:
        raise RefusedError("not the address of an engine")
    return url.with_user(None)  # aiohttp would make an Authorization of it, beside the engine key's


def _session(connect_s: float, *, force_close: bool) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=_Connector(
            limit=0,
            force_close=force_close,
            keepalive_timeout=None if force_close else _KEEPALIVE_S,
            ttl_dns_cache=10,
            socket_factory=_socket,
        ),
        timeout=aiohttp.ClientTimeout(total=None, connect=connect_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        read_bufsize=_HELD_BYTES,
        max_line_size=_MAX_FIELD_BYTES,
        max_field_size=_MAX_FIELD_BYTES,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
    )


def _socket(address: Any) -> socket.socket:
    """A new connection's, which notices that its peer is gone."""
    _attempt.get().dialled = True
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _DEAD_PEER_S // 2)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_PEER_S * 1000)
    return made
