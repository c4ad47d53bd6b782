"""Bare connections to a router, for what no client library would send, or would not leave unread."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, cast
from urllib.parse import urlsplit

PATIENCE_S: Final = 30.0


class RudeClient(asyncio.Protocol):
    """One connection. What came is kept, however the connection ends."""

    def __init__(self) -> None:
        self._got = bytearray()
        self._lost = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()

    async def send(self, *pieces: bytes) -> None:
        """As long as the other side takes it."""
        for piece in pieces:
            await self._writable.wait()
            if self._transport.is_closing():
                return
            self._transport.write(piece)
            await asyncio.sleep(0)  # a connection that breaks is noticed in the loop's next turn

    async def trickle(self, data: bytes, every_s: float) -> None:
        """One byte after the other, until the other side has had enough."""
        for byte in data:
            if self._transport.is_closing():
                return
            self._transport.write(bytes([byte]))
            await asyncio.sleep(every_s)

    async def answer(self) -> bytes:
        """All that came until the other side closed. Raises TimeoutError."""
        async with asyncio.timeout(PATIENCE_S):
            await self._lost.wait()
        return bytes(self._got)

    def read_nothing(self) -> None:
        """From now on."""
        self._transport.pause_reading()

    def abort(self) -> None:
        """Break the connection."""
        self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._got += data

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost.set()
        self._writable.set()


@asynccontextmanager
async def rude_client(url: str) -> AsyncIterator[RudeClient]:
    """Connected, with a small receive buffer."""
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await loop.sock_connect(sock, (parts.hostname, parts.port))
    _, client = await loop.create_connection(RudeClient, sock=sock)
    try:
        yield client
    finally:
        client.abort()
