"""A proxy before an API server that says of watches what a real one says after a long absence: their place in time is gone.

async with ApiProxy(api.url, ca_file) as proxy:   # plain HTTP at proxy.url; who asks still shows a token
    proxy.expire(Gone.EVENT)                      # watches end, and are refused until somebody has listed anew
"""

from __future__ import annotations

import json
import ssl
from contextlib import suppress
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import aiohttp
from aiohttp import web

_HOP_BY_HOP: Final = frozenset({"host", "connection", "transfer-encoding", "content-length", "content-encoding"})
_GONE: Final = {
    "kind": "Status",
    "apiVersion": "v1",
    "metadata": {},
    "status": "Failure",
    "message": "too old resource version: 1 (2)",
    "reason": "Expired",
    "code": 410,
}


class Gone(Enum):
    """The two ways in which API servers say it."""

    EVENT = "event"  # 200, and then an ERROR in the stream
    STATUS = "status"  # 410


class ApiProxy:
    """`refused` counts watches that were told so, by path."""

    def __init__(self, target_url: str, ca_file: Path) -> None:
        self.url = ""
        self.refused: dict[str, int] = {}
        self._target_url = target_url
        self._trust = ssl.create_default_context(cafile=ca_file)
        self._way = Gone.EVENT
        self._watched: set[str] = set()
        self._stale: set[str] = set()
        self._streams: set[aiohttp.ClientResponse] = set()

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._trust, limit=0), auto_decompress=False, timeout=aiohttp.ClientTimeout()
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._cut()
        await self._runner.cleanup()
        await self._session.close()

    @property
    def watched(self) -> frozenset[str]:
        """Paths that somebody has watched so far."""
        return frozenset(self._watched)

    def expire(self, way: Gone) -> None:
        """Ends all watches; each path is refused until it has been listed."""
        self._way, self._stale = way, set(self._watched)
        self.refused.clear()
        self._cut()

    def _cut(self) -> None:
        for stream in self._streams:
            stream.close()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        watches = request.query.get("watch") == "true"
        if watches and request.path in self._stale:
            self.refused[request.path] = self.refused.get(request.path, 0) + 1
            return _gone(self._way)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        url = self._target_url + request.raw_path
        body = await request.read() or None  # an empty one would get a type of its own, which is refused
        async with self._session.request(request.method, url, headers=headers, data=body) as answer:
            if watches and answer.status == 200:
                self._watched.add(request.path)
                self._streams.add(answer)
            try:
                return await _relayed(request, answer)
            finally:
                self._streams.discard(answer)
                if request.method == "GET" and not watches:
                    self._stale.discard(request.path)


async def _relayed(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    headers = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
    relay = web.StreamResponse(status=answer.status, headers=headers)
    if "content-encoding" in answer.headers:
        relay.headers["content-encoding"] = answer.headers["content-encoding"]
    with suppress(aiohttp.ClientError, ConnectionError):  # cut, or nobody listens any more
        await relay.prepare(request)
        async for piece in answer.content.iter_any():
            await relay.write(piece)
    with suppress(ConnectionError):
        await relay.write_eof()
    return relay


def _gone(way: Gone) -> web.Response:
    if way is Gone.STATUS:
        return web.json_response(_GONE, status=410)
    return web.Response(text=json.dumps({"type": "ERROR", "object": _GONE}) + "\n", content_type="application/json")
