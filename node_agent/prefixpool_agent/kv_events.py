"""The engine's KV events without a hole: live subscription, replay, and a monitor that sees the engine come back.

Everything here was found necessary on real vLLM (research: vllm.md 1.3): the replay socket must be a DEALER with room for
everything, its end marker may be lost, and an engine that restarts between two events is noticed only by the handshake.
A gap that replay cannot fill is told to the sink, which must forget what it knew.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Protocol

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from prefixpool_agent.kv_order import END_MARKER, Batch, Order, Verdict, decode_batch, number
from prefixpool_agent.pacing import Pace

LIVE_QUEUE: Final = 50_000  # batches; beyond it ZeroMQ drops, which replay repairs
REPLAY_SILENCE_S: Final = 2.0
REPLAY_TRIES: Final = 5
EVERYTHING: Final = 1 << 62

log = logging.getLogger(__name__)


class KvSink(Protocol):
    """Who follows the events. Called from the loop, in order."""

    def kv_batch(self, batch: Batch) -> None:
        """The next batch."""
        ...

    def kv_lost(self, reason: str) -> None:
        """What was known may be wrong: forget it. Batches after this one are complete again."""
        ...

    def kv_replayed(self, batches: int) -> None:
        """A replay ended."""
        ...


class KvEvents:
    """One subscription, for as long as `run()` runs. `connected`: how often an engine answered the handshake."""

    def __init__(
        self, context: zmq.asyncio.Context, pub: str, replay: str, sink: KvSink, order: Order | None = None
    ) -> None:
        """`pub`, `replay`: ZeroMQ endpoints. `order`: where a saved map ends."""
        self._context = context
        self._pub = pub
        self._replay_endpoint = replay
        self._sink = sink
        self._pace = Pace()
        self.order = order or Order()
        self.connected = 0
        self.caught_up = asyncio.Event()  # the first replay is over

    async def run(self) -> None:
        """Until cancelled."""
        sub: zmq.asyncio.Socket = self._context.socket(zmq.SUB)
        sub.setsockopt(zmq.RCVHWM, LIVE_QUEUE)
        sub.setsockopt(zmq.SUBSCRIBE, b"")
        monitor = sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        poller = zmq.asyncio.Poller()
        poller.register(sub, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        try:
            sub.connect(self._pub)
            while True:
                ready = dict(await poller.poll())
                if monitor in ready:
                    parse_monitor_message(await monitor.recv_multipart())
                    await self._handshake()
                elif sub in ready:
                    await self._live(await sub.recv_multipart())
                    await self._pace.breathe()
        finally:
            sub.disable_monitor()
            monitor.close(linger=0)
            sub.close(linger=0)

    async def _handshake(self) -> None:
        """The first one catches up; any later one means that the engine may be another."""
        self.connected += 1
        if self.connected > 1:
            self._lost("the engine's event stream was reconnected")
            self.order.restart()
        await self._replay(EVERYTHING, tries=1)
        self.caught_up.set()

    async def _live(self, frames: list[bytes]) -> None:
        try:
            seq = number(frames[-2])
        except (ValueError, IndexError):
            return  # not from an engine
        try:
            batch = decode_batch(frames[-1])
        except ValueError as error:
            self._lost(f"an event could not be read: {error}")
            self.order.skip_to(seq + 1)
            return
        verdict = self.order.judge(seq, batch.at_s)
        if verdict is Verdict.DUPLICATE:
            return
        if verdict is Verdict.RESTARTED:
            self._lost("the engine's event numbers began again")
            self.order.restart()
        if seq > self.order.next_seq:
            await self._fill(seq)
        if seq == self.order.next_seq:
            self._apply(seq, batch)

    async def _fill(self, seq: int) -> None:
        await self._replay(seq, tries=REPLAY_TRIES)
        if seq > self.order.next_seq:
            self._lost(f"{seq - self.order.next_seq} event batches were lost")
            self.order.skip_to(seq)

    async def _replay(self, upto: int, tries: int) -> None:
        """Fetch from the next expected batch on, up to (not including) `upto`; more is applied if it comes."""
        for _ in range(tries):
            before = self.order.next_seq
            await self._replay_once(upto)
            self._sink.kv_replayed(self.order.next_seq - before)
            if self.order.next_seq >= upto:
                return

    async def _replay_once(self, upto: int) -> None:
        dealer: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVHWM, 0)  # the engine's buffer_steps bounds it; a bound here loses batches silently
        dealer.setsockopt(zmq.LINGER, 0)
        try:
            dealer.connect(self._replay_endpoint)
            await dealer.send_multipart([b"", self.order.next_seq.to_bytes(8, "big")])
            first = True
            while self.order.next_seq < upto:
                frames = await asyncio.wait_for(dealer.recv_multipart(), REPLAY_SILENCE_S)
                if len(frames) < 2 or frames[-2] == END_MARKER:
                    return
                self._replayed(frames, first)
                first = False
                await self._pace.breathe()
        except TimeoutError:
            log.info("replay of KV events ended without its end marker")
        except ValueError as error:
            self._lost(f"a replayed event could not be read: {error}")
        finally:
            dealer.close(linger=0)

    def _replayed(self, frames: list[bytes], first: bool) -> None:
        seq = number(frames[-2])
        if first and seq > self.order.next_seq:
            if self.order.next_seq:  # something was known, and it does not join up
                self._lost(f"{seq - self.order.next_seq} event batches are older than the engine's replay buffer")
            self.order.skip_to(seq)
        if seq == self.order.next_seq:
            self._apply(seq, decode_batch(frames[-1]))

    def _apply(self, seq: int, batch: Batch) -> None:
        self._sink.kv_batch(batch)
        self.order.applied(seq, batch.at_s)

    def _lost(self, reason: str) -> None:
        self._sink.kv_lost(reason)
