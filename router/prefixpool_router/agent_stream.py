"""One agent's stream: connect, greet, apply what comes, notice silence, come back. Everything it learns goes to a sink.

Every wait has a deadline: connecting and greeting, and `wire.STALE_AFTER_S` for each frame after that (agents send a load
report at least once a second, so silence means that the agent, or the way to it, is gone).
"""

from __future__ import annotations

import asyncio
import logging
import math
from array import array
from collections.abc import Callable
from typing import Final, Protocol

import aiohttp
import msgspec

from prefixpool import wire
from prefixpool.errors import WireError
from prefixpool.names import PATH_STREAM
from prefixpool.wire import Tier

_log = logging.getLogger(__name__)

GREET_S: Final = 2.0  # to connect, and again until the agent's Welcome
FEED_ENTRIES: Final = 2000  # boundaries applied in one go: about a millisecond (research: prefix_index.md)
FIRST_PAUSE_S: Final = 0.1  # before connecting again; doubles, jittered, up to the next one
LONGEST_PAUSE_S: Final = 1.0  # routers must know again within seconds
VERSION_PAUSE_S: Final = 5.0  # an agent of another version stays one until somebody upgrades it
_MAX_FRAME_BYTES: Final = 64 << 20
_REASONS: Final = {
    wire.CLOSE_VERSION: f"agent does not speak version {wire.VERSION} of the stream",
    wire.CLOSE_UNAUTHORISED: "agent refuses the engine key",
}


_News = (
    wire.SnapshotBegin | wire.SnapshotEnd | wire.Publish | wire.Retract | wire.Load | wire.Costs | wire.Status | wire.Unknown
)


class AgentSink(Protocol):
    """What a stream tells. All calls come from one task, in the order in which the agent sent them."""

    def welcomed(self, welcome: wire.Welcome) -> None:
        """Connected. Raises WireError if this is the wrong agent."""
        ...

    def snapshot_begins(self, begin: wire.SnapshotBegin) -> None: ...
    def snapshot_ended(self, end: wire.SnapshotEnd) -> None: ...
    def published(self, tier: Tier, hashes: array[int], depths: array[int]) -> None: ...
    def retracted(self, tier: Tier, hashes: array[int]) -> None: ...
    def load_reported(self, load: wire.Load) -> None: ...
    def costs_measured(self, costs: wire.Costs) -> None: ...
    def status_changed(self, status: wire.Status) -> None: ...

    def lost(self, why: str) -> None:
        """The stream broke or could not be made. Repeated for each failed attempt."""
        ...


class AgentStream:
    """Runs until cancelled. `feed` is shared by all streams: whoever holds it may apply one large piece to the index."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: str,
        sink: AgentSink,
        *,
        router: str,
        key: Callable[[], str],
        feed: asyncio.Lock,
        draw: Callable[[], float],
        stale_after_s: float = wire.STALE_AFTER_S,
    ) -> None:
        self._http = http
        self._url = url
        self._sink = sink
        self._router = router
        self._key = key
        self._feed = feed
        self._draw = draw  # uniform in [0, 1)
        self._stale_after_s = stale_after_s
        self._pause_s = FIRST_PAUSE_S

    async def run(self) -> None:
        """Never returns."""
        while True:
            try:
                why = await self._one_connection()
            except Exception as error:  # noqa: BLE001 -- a defect met through one agent must not freeze what is known of it
                _log.exception("agent stream failed", extra={"agent": self._url})
                why = f"defect of this router: {type(error).__name__}"
            self._sink.lost(why)
            _log.debug("agent stream lost", extra={"agent": self._url, "why": why})
            await asyncio.sleep(self._pause_s * (0.5 + self._draw() / 2))
            self._pause_s = min(self._pause_s * 2, max(self._pause_s, LONGEST_PAUSE_S))

    async def _one_connection(self) -> str:
        """Why it ended, in words."""
        try:
            async with asyncio.timeout(GREET_S):
                socket = await self._connect()
        except TimeoutError:
            return f"no connection within {GREET_S:g} s"
        except aiohttp.WSServerHandshakeError as error:
            return _REASONS[wire.CLOSE_UNAUTHORISED] if error.status == 401 else f"agent answers {error.status}"
        except (aiohttp.ClientError, OSError) as error:
            return f"no connection: {error}"
        try:
            return await self._converse(socket)
        except (WireError, msgspec.DecodeError) as error:  # ValidationError is a DecodeError
            return f"agent speaks nonsense: {error}"
        except (aiohttp.ClientError, OSError) as error:
            return f"stream broke: {error}"
        finally:
            await socket.close()

    async def _connect(self) -> aiohttp.ClientWebSocketResponse:
        key = self._key()
        return await self._http.ws_connect(
            self._url + PATH_STREAM,
            headers={"Authorization": f"Bearer {key}"} if key else None,
            timeout=aiohttp.ClientWSTimeout(ws_close=0.5),
            max_msg_size=_MAX_FRAME_BYTES,
            autoping=True,
        )

    async def _converse(self, socket: aiohttp.ClientWebSocketResponse) -> str:
        await socket.send_bytes(wire.encode(wire.Hello(router=self._router)))
        greeted = False
        while True:
            limit_s = self._stale_after_s if greeted else GREET_S
            try:
                frame = await socket.receive(timeout=limit_s)
            except TimeoutError:
                return f"agent silent for {limit_s:g} s"
            if frame.type is not aiohttp.WSMsgType.BINARY:
                return self._ended(socket, frame)
            message = wire.decode_from_agent(frame.data)
            if greeted == isinstance(message, wire.Welcome):
                raise WireError("Welcome must come first, and once")
            if isinstance(message, wire.Welcome):
                greeted = True
                self._greet(message)
            else:
                await self._apply(message)
            if isinstance(message, wire.Status) and message.state is wire.State.FENCED:
                # The sink has taken the replica out of every choice from now on.
                await socket.send_bytes(wire.encode(wire.FenceAck(epoch=message.epoch)))

    def _greet(self, welcome: wire.Welcome) -> None:
        if welcome.version != wire.VERSION:
            self._pause_s = VERSION_PAUSE_S
            raise WireError(f"version {welcome.version} of the stream, this router speaks {wire.VERSION}")
        self._sink.welcomed(welcome)
        self._pause_s = FIRST_PAUSE_S

    def _ended(self, socket: aiohttp.ClientWebSocketResponse, frame: aiohttp.WSMessage) -> str:
        if frame.type is aiohttp.WSMsgType.TEXT:
            raise WireError("text frame")
        if frame.type is aiohttp.WSMsgType.ERROR:
            return f"stream broke: {frame.data}"
        if socket.close_code == wire.CLOSE_VERSION:
            self._pause_s = VERSION_PAUSE_S
        return _REASONS.get(socket.close_code or 0, f"agent closed the stream ({socket.close_code})")

    async def _apply(self, message: _News) -> None:
        sink = self._sink
        match message:
            case wire.Publish():
                await self._publish(message)
            case wire.Retract():
                sink.retracted(message.tier, _unpacked(wire.unpack_hashes, message.hashes))
            case wire.Load():
                sink.load_reported(message)
            case wire.SnapshotBegin():
                sink.snapshot_begins(message)
            case wire.SnapshotEnd():
                sink.snapshot_ended(message)
            case wire.Status():
                sink.status_changed(message)
            case wire.Costs():
                sink.costs_measured(_sane(message))
            case wire.Unknown():
                _log.debug("a newer agent says more than this router understands", extra={"what": message.what})

    async def _publish(self, message: wire.Publish) -> None:
        """Apply in small pieces, one a turn of the event loop over all streams, so that snapshots never stall requests."""
        if message.tier is Tier.ABSENT:
            raise WireError("published as absent")
        hashes = _unpacked(wire.unpack_hashes, message.hashes)
        depths = _unpacked(wire.unpack_depths, message.depths)
        if len(hashes) != len(depths):
            raise WireError(f"{len(hashes)} boundaries with {len(depths)} depths")
        if len(hashes) <= FEED_ENTRIES // 8:
            self._sink.published(message.tier, hashes, depths)
            return
        for start in range(0, len(hashes), FEED_ENTRIES):
            piece = slice(start, start + FEED_ENTRIES)
            async with self._feed:
                self._sink.published(message.tier, hashes[piece], depths[piece])
                await asyncio.sleep(0)


def _sane(costs: wire.Costs) -> wire.Costs:
    if not all(math.isfinite(value) and value >= 0 for value in msgspec.structs.astuple(costs)):
        raise WireError("costs that are no durations")
    return costs


def _unpacked(unpack: Callable[[bytes], array[int]], packed: bytes) -> array[int]:
    try:
        return unpack(packed)
    except ValueError as error:
        raise WireError(str(error)) from error
