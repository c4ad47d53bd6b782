"""A scriptable agent: a WebSocket server that speaks `wire.py` without an engine behind it. 256 of them fit in one process.

agent = FakeAgent("pool-0")
await agent.start()
agent.hold(hashes, depths)              # part of the next snapshot, or a delta to those who are connected
agent.report(inflight=3)
agent.restart_engine()                  # a new epoch, an empty cache
agent.silent = True                     # connected, but dead
await agent.stop()
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Final

import msgspec
from aiohttp import WSMsgType, web

from prefixpool import wire
from prefixpool.names import PATH_STREAM
from prefixpool.wire import Mode, State, Tier

_PIECE: Final = 2000  # boundaries in one frame of a snapshot


class FakeAgent:
    """State is plain attributes; changing one through a method tells every connected router."""

    def __init__(
        self, replica: str, *, key: str = "", epoch: int = 1, block_tokens: int = 16, heartbeat: bool = True
    ) -> None:
        self.replica = replica
        self.key = key
        self.version = wire.VERSION
        self.silent = False  # says nothing any more, on living connections and on new ones
        self.hold_snapshots = False  # stop behind SnapshotBegin, until `release_snapshots`
        self.garbage: bytes | None = None  # sent instead of a snapshot
        self.status = wire.Status(state=State.READY, epoch=epoch)
        self.load = wire.Load()
        self.welcome = wire.Welcome(
            replica=replica, epoch=epoch, block_tokens=block_tokens, device_tokens=100_000, models=("model",)
        )
        self.resident: dict[Tier, dict[int, int]] = {Tier.DEVICE: {}}
        self.acknowledged: list[int] = []  # epochs of FenceAcks
        self.connections = 0  # ever made
        self.port = 0
        self._heartbeat = heartbeat
        self._sockets: set[web.WebSocketResponse] = set()
        self._held: set[web.WebSocketResponse] = set()
        self._runner: web.AppRunner | None = None
        self._beat: asyncio.Task[None] | None = None

    # -- life

    async def start(self, port: int = 0) -> None:
        """Listen on loopback; the port is then `self.port`."""
        app = web.Application()
        app.router.add_get(PATH_STREAM, self._stream)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.port = int(self._runner.addresses[0][1])
        if self._heartbeat:
            self._beat = asyncio.create_task(self._beats())

    async def stop(self) -> None:
        """As if killed: connections break, the port is free."""
        if self._beat is not None:
            self._beat.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._beat
            self._beat = None
        await self.drop_connections()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def drop_connections(self) -> None:
        """Break what is connected now; routers may come back."""
        for socket in list(self._sockets):
            await socket.close()

    @property
    def url(self) -> str:
        """Origin."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def connected(self) -> int:
        """Routers that have had their snapshot begun."""
        return len(self._sockets)

    # -- what it says

    async def hold(self, hashes: Sequence[int], depths: Sequence[int], tier: Tier = Tier.DEVICE) -> None:
        """These boundaries are resident from now on."""
        self.resident.setdefault(tier, {}).update(zip(hashes, depths, strict=True))
        await self.send(_publish(tier, hashes, depths))

    async def drop(self, hashes: Sequence[int], tier: Tier = Tier.DEVICE) -> None:
        """These are gone."""
        for boundary in hashes:
            self.resident[tier].pop(boundary, None)
        await self.send(wire.Retract(tier=tier, hashes=wire.pack_hashes(hashes)))

    async def report(self, load: wire.Load) -> None:
        """A load report."""
        self.load = load
        await self.send(load)

    async def tell(self, state: State, *, mode: Mode = Mode.PRECISE, reason: str = "") -> None:
        """Another state of the engine."""
        self.status = wire.Status(state=state, epoch=self.status.epoch, mode=mode, reason=reason)
        await self.send(self.status)

    async def restart_engine(self) -> None:
        """Its engine is back, ready and empty."""
        epoch = self.status.epoch + 1
        self.resident = {Tier.DEVICE: {}}
        self.status = msgspec.structs.replace(self.status, epoch=epoch, state=State.READY)
        self.welcome = msgspec.structs.replace(self.welcome, epoch=epoch)
        for socket in list(self._sockets):
            await self._snapshot(socket, "engine restarted")
        await self.send(self.status)

    async def snapshot(self, reason: str = "events lost") -> None:
        """The whole picture again, to everybody."""
        for socket in list(self._sockets):
            await self._snapshot(socket, reason)

    async def release_snapshots(self) -> None:
        """Finish what `hold_snapshots` held."""
        self.hold_snapshots = False
        held, self._held = self._held, set()
        for socket in held:
            await self._fill(socket)

    async def send(self, message: wire.FromAgent) -> None:
        """To every connected router."""
        await self.send_raw(wire.encode(message))

    async def send_raw(self, frame: bytes) -> None:
        """Whatever bytes."""
        if self.silent:
            return
        for socket in list(self._sockets):
            await _send(socket, frame)

    # -- connections

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.Response(status=401)
        socket = web.WebSocketResponse(compress=False)
        await socket.prepare(request)
        self.connections += 1
        hello = await socket.receive(timeout=5)
        if hello.type is not WSMsgType.BINARY or self.silent:
            return await self._mute(socket)
        if self.version != wire.VERSION:
            await socket.close(code=wire.CLOSE_VERSION, message=b"version")
            return socket
        await self._greet(socket)
        try:
            async for frame in socket:
                self._heard(frame.data)
        finally:
            self._sockets.discard(socket)
            self._held.discard(socket)
        return socket

    async def _mute(self, socket: web.WebSocketResponse) -> web.WebSocketResponse:
        self._sockets.add(socket)
        async for _ in socket:
            pass
        self._sockets.discard(socket)
        return socket

    def _heard(self, data: bytes) -> None:
        message = wire.decode_from_router(data)
        if isinstance(message, wire.FenceAck):
            self.acknowledged.append(message.epoch)

    async def _greet(self, socket: web.WebSocketResponse) -> None:
        await _send(socket, wire.encode(self.welcome))
        if self.garbage is not None:
            await _send(socket, self.garbage)
        await _send(socket, wire.encode(self.status))
        await _send(socket, wire.encode(self.load))
        self._sockets.add(socket)
        await self._snapshot(socket, "connected")

    async def _snapshot(self, socket: web.WebSocketResponse, reason: str) -> None:
        total = sum(map(len, self.resident.values()))
        begin = wire.SnapshotBegin(epoch=self.status.epoch, boundaries=total, reason=reason)
        await _send(socket, wire.encode(begin))
        if self.hold_snapshots:
            self._held.add(socket)
        else:
            await self._fill(socket)

    async def _fill(self, socket: web.WebSocketResponse) -> None:
        for tier, boundaries in self.resident.items():
            hashes, depths = list(boundaries), list(boundaries.values())
            for start in range(0, len(hashes), _PIECE):
                piece = slice(start, start + _PIECE)
                await _send(socket, wire.encode(_publish(tier, hashes[piece], depths[piece])))
        await _send(socket, wire.encode(wire.SnapshotEnd(epoch=self.status.epoch)))

    async def _beats(self) -> None:
        while True:
            await asyncio.sleep(wire.HEARTBEAT_S)
            await self.send(self.load)


def _publish(tier: Tier, hashes: Sequence[int], depths: Sequence[int]) -> wire.Publish:
    return wire.Publish(tier=tier, hashes=wire.pack_hashes(hashes), depths=wire.pack_depths(depths))


async def _send(socket: web.WebSocketResponse, frame: bytes) -> None:
    if not socket.closed:
        with contextlib.suppress(ConnectionError):  # the router went away: nobody to tell
            await socket.send_bytes(frame)
