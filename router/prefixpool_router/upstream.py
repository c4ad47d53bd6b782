"""Connections to all engines, and their failures in the words that retries are decided by."""

from __future__ import annotations

import asyncio
import functools
import socket
from contextvars import ContextVar
from typing import Any, Final

import aiohttp
from aiohttp import hdrs
from aiohttp.connector import Connection
from aiohttp.tracing import Trace
from yarl import URL

from prefixpool_router.engine_answer import EngineAnswer
from prefixpool_router.engine_call import EngineCall, EngineRequest
from prefixpool_router.failures import RefusedError, ResetError

# Engines drop idle connections after 5 s (uvicorn's default); ours must go first, or a request meets a closing connection.
_KEEPALIVE_S: Final = 4.0
_RACE_S: Final = 1.0  # a connection that breaks later than this broke over its request
# A peer whose machine is gone answers nothing at all; the kernel finds out in about this time, whatever waits on the socket.
_DEAD_PEER_S: Final = 10


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
        self._kept = _connector(force_close=False)
        self._fresh = _connector(force_close=True)  # one new connection for each request
        self._timeout = aiohttp.ClientTimeout(total=None, connect=connect_s)
        # Memoised, because few differ and parsing costs much.
        self._destination = functools.lru_cache(maxsize=512)(_destination)

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
            return await self._ask(self._kept, engine_url, request)
        except ResetError:
            late = loop.time() - began_s > _RACE_S
            if attempt.dialled or late or not isinstance(request.body, bytes):
                raise
        try:
            return await self._ask(self._fresh, engine_url, request)
        except RefusedError as error:  # it was there a moment ago: it may have died of this very request
            raise ResetError("the engine broke the connection and is gone") from error

    async def close(self) -> None:
        """Breaks all connections."""
        await self._kept.close()
        await self._fresh.close()

    async def _ask(self, connector: _Connector, engine_url: str, request: EngineRequest) -> EngineAnswer:
        destination = self._destination(engine_url, request.target, asyncio.get_running_loop())
        try:
            connection = await connector.connect(destination, [], self._timeout)
        except (aiohttp.ClientConnectorError, TimeoutError) as error:
            raise RefusedError from error
        except (aiohttp.ClientError, OSError) as error:
            raise ResetError from error
        call = EngineCall(connection)
        host, target = destination.headers[hdrs.HOST], destination.url.raw_path_qs
        return EngineAnswer(call, *await call.ask(request, host=host, target=target, last=connector.force_close))


def _destination(engine_url: str, target: str, loop: asyncio.AbstractEventLoop) -> aiohttp.ClientRequest:
    """In aiohttp's words. Raises RefusedError."""
    try:
        url = URL(engine_url + target, encoded=True)
        usable = url.scheme in ("http", "https") and url.host is not None and url.port is not None
    except ValueError as error:  # what its parts say is found out when they are asked for
        raise RefusedError("not the address of an engine") from error
    if not usable:
        raise RefusedError("not the address of an engine")
    return aiohttp.ClientRequest("GET", url.with_user(None), loop=loop)


def _connector(*, force_close: bool) -> _Connector:
    return _Connector(
        limit=0,
        force_close=force_close,
        keepalive_timeout=None if force_close else _KEEPALIVE_S,
        ttl_dns_cache=10,
        socket_factory=_socket,
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
