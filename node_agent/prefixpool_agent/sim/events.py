"""Publishes KV events as vLLM's ZmqEventPublisher does: PUB with sequence numbers, ROUTER for replay (research: vllm.md 1).

Kept on purpose: a ROUTER drops silently when a client reads too slowly, the END marker included; sequence numbers start at
0 with every engine start; nothing is sent while nothing happens. Not kept: vLLM's thread; here the event loop sends.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

from prefixpool_agent.sim.pool import Event

END_SEQUENCE: Final = b"\xff" * 8
_REPLAY_BURST: Final = 256  # batches sent before others get a turn of the event loop


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`--kv-events-config`, with vLLM's names and defaults."""

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""


class EventPublisher:
    """Binds in `open()`, which must run on the event loop that later publishes."""

    def __init__(self, config: KvEventsConfig) -> None:
        self.config = config
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._next = 0
        self._topic = config.topic.encode()
        self._context = zmq.asyncio.Context()
        self._pub: zmq.Socket[bytes] | None = None
        self._replay: asyncio.Task[None] | None = None

    @property
    def enabled(self) -> bool:
        return self.config.enable_kv_cache_events and self.config.publisher == "zmq"

    def open(self) -> None:
        """Raises zmq.ZMQError if an endpoint cannot be bound."""
        if not self.enabled:
            return
        self._pub = zmq.Socket(self._context, zmq.PUB)
        self._pub.set_hwm(self.config.hwm)
        endpoint = self.config.endpoint
        if "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://")):
            self._pub.bind(endpoint)
        else:
            self._pub.connect(endpoint)  # as vLLM: a plain address is somebody else's SUB
        if self.config.replay_endpoint is not None:
            router = self._context.socket(zmq.ROUTER)
            router.bind(self.config.replay_endpoint)
            self._replay = asyncio.get_running_loop().create_task(self._serve_replay(router))

    async def close(self) -> None:
        if self._replay is not None:
            self._replay.cancel()
            await asyncio.gather(self._replay, return_exceptions=True)
        if self._pub is not None:
            self._pub.close(linger=0)
        self._context.destroy(linger=0)

    def publish(self, events: Sequence[Event]) -> None:
        """One batch, the events of one step. Never blocks: a subscriber that is too slow misses batches."""
        if self._pub is None or not events:
            return
        payload = msgspec.msgpack.encode([time.time(), events, 0])
        number, self._next = self._next, self._next + 1
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
        self._buffer.append((number, payload))

    def describe(self) -> dict[str, Any] | None:
        """What `/kv_event_sources` shows."""
        return msgspec.structs.asdict(self.config) if self.enabled else None

    async def _serve_replay(self, router: zmq.asyncio.Socket) -> None:
        try:
            while True:
                frames = await router.recv_multipart()
                if len(frames) == 3:
                    await self._send_replay(router, frames[0], int.from_bytes(frames[2], "big"))
        finally:
            router.close(linger=0)

    async def _send_replay(self, router: zmq.asyncio.Socket, client: bytes, start: int) -> None:
        for sent, (number, payload) in enumerate(tuple(self._buffer)):
            if number >= start:
                await router.send_multipart((client, b"", self._topic, number.to_bytes(8, "big"), payload))
            if sent % _REPLAY_BURST == 0:
                await asyncio.sleep(0)
        await router.send_multipart((client, b"", b"", END_SEQUENCE, b""))
