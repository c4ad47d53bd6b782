"""A way to a server that can be cut or go dead, as networks do, without the server noticing.

async with Link(agent.url) as link:
    ...                 # `link.url` leads to the agent
    link.freeze()       # connections stay, nothing passes; new ones are made, and nothing passes either
    link.cut()          # connections break, new ones are refused
    await link.heal()
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit


class Link:
    """A relay on a loopback port of its own."""

    def __init__(self, target_url: str) -> None:
        parts = urlsplit(target_url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._target = (parts.hostname, parts.port)
        self._port = 0
        self._passing = asyncio.Event()
        self._passing.set()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._cuts = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        await self.heal()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.cut()

    def freeze(self) -> None:
        """What is sent from now on stays on its way."""
        self._passing.clear()

    def cut(self) -> None:
        """Break and refuse connections."""
        self._cuts += 1
        if self._server is not None:
            # A connection that is just being accepted would be left half made by a server that closes (asyncio before 3.12).
            loop = asyncio.get_running_loop()
            for listener in self._server.sockets:
                loop.remove_reader(listener.fileno())
            loop.call_soon(self._server.close)
            self._server = None
        for writer in self._writers:
            writer.transport.abort()
        self._passing.set()  # whoever waits finds its connection gone

    async def heal(self) -> None:
        """Let everything through again."""
        self._passing.set()
        if self._server is None:
            await asyncio.sleep(0)  # the former server has closed by then
            relay = partial(self._relay, self._cuts)
            self._server = await asyncio.start_server(relay, "127.0.0.1", self._port, backlog=1024)
            self._port = int(self._server.sockets[0].getsockname()[1])

    async def _relay(self, cuts: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """`cuts`: how many there had been when the way of this connection was opened."""
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        if cuts != self._cuts:  # it was cut while it was made
            writer.transport.abort()
            far_writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, far_writer))
                group.create_task(self._pump(far_reader, writer))
        finally:
            self._writers -= {writer, far_writer}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(1 << 16):
                await self._passing.wait()
                writer.write(piece)
                await writer.drain()
        with contextlib.suppress(OSError):
            writer.close()
