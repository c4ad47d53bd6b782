"""Connections to all engines: made when needed, kept for a few seconds, without any cap on their number."""

from __future__ import annotations

import asyncio
import functools
import ssl
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from prefixpool_router.engine_connection import EngineAnswer, EngineConnection
from prefixpool_router.engine_http import EngineRequest
from prefixpool_router.failures import RefusedError, ResetError

# Engines drop idle connections after 5 s (uvicorn's default); ours must go first, or a request meets a closing connection.
_KEEPALIVE_S: Final = 4.0
_RACE_S: Final = 1.0  # a connection that breaks later than this broke over its request


class Origin(NamedTuple):
    """Where an engine listens."""

    host: str
    port: int
    tls: bool
    authority: str  # for the Host header
    prefix: str  # path before every target, without trailing slash


class Upstream:
    """Owns the connections; use and `close` it in one loop. `connect_s`: deadline to reach an engine."""

    def __init__(self, *, connect_s: float) -> None:
        self._connect_s = connect_s
        self._idle: dict[Origin, list[EngineConnection]] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    async def send(self, engine_url: str, request: EngineRequest) -> EngineAnswer:
        """Begin a request and wait for the head of its answer. Raises RefusedError or ResetError; has no deadline.

        A kept connection may be closed by its engine in the very moment of its use; such a request is sent once more to the
        same engine, on a new connection.
        """
        origin = _origin(engine_url)
        kept = self._kept(origin)
        if kept is not None:
            began_s = asyncio.get_running_loop().time()
            try:
                return await self._begin(kept, origin, request)
            except ResetError:
                if not isinstance(request.body, bytes) or asyncio.get_running_loop().time() - began_s > _RACE_S:
                    raise
        connection = await self._connect(origin, lost_one=kept is not None)
        return await self._begin(connection, origin, request)

    async def _begin(self, connection: EngineConnection, origin: Origin, request: EngineRequest) -> EngineAnswer:
        answer = connection.send(request, request.head(origin.authority, origin.prefix))
        try:
            await answer.wait_head()
        except BaseException:
            answer.close()  # also when the client goes away while the engine works on its prompt
            raise
        return answer

    def _kept(self, origin: Origin) -> EngineConnection | None:
        kept = self._idle.get(origin)
        oldest_s = asyncio.get_running_loop().time() - _KEEPALIVE_S
        while kept:
            connection = kept.pop()
            if connection.usable and connection.idle_since_s > oldest_s:
                return connection
            connection.abort()
        return None

    async def _connect(self, origin: Origin, *, lost_one: bool) -> EngineConnection:
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: EngineConnection(functools.partial(self._keep, origin)),
                    origin.host,
                    origin.port,
                    ssl=_client_tls() if origin.tls else None,
                )
        except OSError as error:  # also TimeoutError and all of ssl's
            if lost_one:  # it was there a moment ago: it may have died of this very request
                raise ResetError("the engine broke the connection and is gone") from error
            raise RefusedError from error
        return connection

    def _keep(self, origin: Origin, connection: EngineConnection) -> None:
        if self._closed:
            connection.abort()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since_s = loop.time()
        self._idle.setdefault(origin, []).append(connection)
        if self._sweeper is None:
            self._sweeper = loop.call_later(_KEEPALIVE_S, self._sweep)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        oldest_s = loop.time() - _KEEPALIVE_S
        for origin, kept in list(self._idle.items()):
            for connection in kept:
                if connection.idle_since_s <= oldest_s:
                    connection.abort()
            self._idle[origin] = [connection for connection in kept if connection.usable]
            if not self._idle[origin]:
                del self._idle[origin]
        self._sweeper = loop.call_later(_KEEPALIVE_S, self._sweep) if self._idle else None

    async def close(self) -> None:
        """Breaks kept connections; those in use belong to their answers."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for kept in self._idle.values():
            for connection in kept:
                connection.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # let the transports say goodbye


@functools.lru_cache(maxsize=1024)
def _origin(engine_url: str) -> Origin:
    parts = urlsplit(engine_url)
    if parts.scheme not in ("http", "https") or parts.hostname is None:
        raise RefusedError(f"not the address of an engine: {engine_url}")
    tls = parts.scheme == "https"
    return Origin(
        parts.hostname, parts.port or (443 if tls else 80), tls, parts.netloc.rpartition("@")[2], parts.path.rstrip("/")
    )


@functools.cache
def _client_tls() -> ssl.SSLContext:
    return ssl.create_default_context()  # reads the system's authorities: slow, and needed for few engines only
