"""The least that an aiohttp proxy can be: reads a request, passes it to the next backend, relays the answer.

No parsing, hashing, choice, book-keeping, retry, limit or metric: what it costs, no router on aiohttp can go below without
leaving its client and server. A target of bench/router.py. argv = port, urls.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from itertools import cycle

import aiohttp
import uvloop
from aiohttp import web


class BareProxy:
    """Round robin over `urls`."""

    def __init__(self, urls: list[str], session: aiohttp.ClientSession) -> None:
        self._urls: Iterator[str] = cycle(urls)
        self._session = session

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {"Content-Type": "application/json"}
        async with self._session.request(
            request.method, next(self._urls) + request.path, data=body, headers=headers
        ) as answer:
            if "Content-Length" in answer.headers:
                return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)
            out = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await out.prepare(request)
            async for piece in answer.content.iter_any():
                await out.write(piece)
            await out.write_eof()
            return out


async def _serve(port: int, urls: list[str]) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
        app = web.Application(client_max_size=16 << 20)
        app.router.add_route("*", "/{path:.*}", BareProxy(urls, session).handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1]), sys.argv[2:]))
