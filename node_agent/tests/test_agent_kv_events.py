"""KV events over real ZeroMQ: nothing is missed, nothing is taken twice, and a hole is told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from prefixpool_agent.kv_events import KvEvents
from prefixpool_agent.kv_order import END_MARKER, Batch, Order, Verdict, decode_batch


class Sink:
    """Remembers; a loss clears, as a picture would."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.losses: list[str] = []

    def kv_batch(self, batch: Batch) -> None:
        self.seen.append(batch.events[0]["n"])

    def kv_lost(self, reason: str) -> None:
        self.losses.append(reason)
        self.seen.clear()

    def kv_replayed(self, batches: int) -> None:
        pass


class FakeEngine:
    """Publishes batches and replays its buffer, as vLLM's publisher does. `base` numbers the contents of one start."""

    def __init__(self, folder: Path, base: int = 0, keep: int = 10_000, at_s: float = 1000.0) -> None:
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.bind(f"ipc://{folder}/kv.pub")
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(f"ipc://{folder}/kv.replay")
        self._base, self._keep, self._at_s = base, keep, at_s
        self.buffer: list[tuple[int, bytes]] = []
        self.next_seq = 0
        self.asked: list[int] = []
        self.end_marker = True
        self._task = asyncio.create_task(self._serve())

    async def publish(self, count: int = 1, *, lost: bool = False) -> None:
        for _ in range(count):
            seq, self.next_seq = self.next_seq, self.next_seq + 1
            event = {"type": "BlockStored", "n": self._base + seq}
            payload = msgspec.msgpack.encode([self._at_s + seq, [event], 0])
            self.buffer = [*self.buffer[-self._keep + 1 :], (seq, payload)]
            if not lost:
                await self._pub.send_multipart([b"kv", seq.to_bytes(8, "big"), payload])

    async def _serve(self) -> None:
        while True:
            who, _, start = await self._router.recv_multipart()
            begin = int.from_bytes(start, "big")
            self.asked.append(begin)
            for seq, payload in self.buffer:
                if seq >= begin:
                    await self._router.send_multipart([who, b"", b"kv", seq.to_bytes(8, "big"), payload])
            if self.end_marker:
                await self._router.send_multipart([who, b"", b"", END_MARKER, b""])

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)


@contextlib.asynccontextmanager
async def following(folder: Path, sink: Sink, order: Order | None = None) -> AsyncIterator[KvEvents]:
    context = zmq.asyncio.Context()
    events = KvEvents(context, f"ipc://{folder}/kv.pub", f"ipc://{folder}/kv.replay", sink, order)
    task = asyncio.create_task(events.run())
    try:
        yield events
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        context.destroy(linger=0)


async def until(sink: Sink, expected: list[int]) -> None:
    async with asyncio.timeout(10):
        while sink.seen != expected:  # noqa: ASYNC110  the sink is not asynchronous
            await asyncio.sleep(0.005)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


async def test_late_subscriber_learns_what_was_published_before(folder: Path) -> None:
    sink, engine = Sink(), FakeEngine(folder)
    await engine.publish(50)
    async with following(folder, sink) as events:
        await until(sink, list(range(50)))
        await asyncio.wait_for(events.caught_up.wait(), 5)
        await engine.publish(5)
        await until(sink, list(range(55)))
        assert sink.losses == []
    await engine.close()


async def test_gap_is_filled_by_replay(folder: Path) -> None:
    sink, engine = Sink(), FakeEngine(folder)
    async with following(folder, sink) as events:
        await asyncio.wait_for(events.caught_up.wait(), 5)
        await engine.publish(3)
        await until(sink, [0, 1, 2])
        await engine.publish(4, lost=True)
        await engine.publish(1)
        await until(sink, list(range(8)))
        assert sink.losses == []
    await engine.close()


async def test_gap_that_left_the_buffer_is_told_and_following_goes_on(folder: Path) -> None:
    sink, engine = Sink(), FakeEngine(folder, keep=5)
    async with following(folder, sink) as events:
        await asyncio.wait_for(events.caught_up.wait(), 5)
        await engine.publish(2)
        await until(sink, [0, 1])
        await engine.publish(20, lost=True)
        await engine.publish(1)
        await until(sink, [18, 19, 20, 21, 22])
        assert len(sink.losses) == 1
    await engine.close()


async def test_engine_that_restarts_between_two_events_is_noticed_by_its_handshake(folder: Path) -> None:
    sink, first = Sink(), FakeEngine(folder)
    async with following(folder, sink) as events:
        await asyncio.wait_for(events.caught_up.wait(), 5)
        await first.publish(4)
        await until(sink, [0, 1, 2, 3])
        await first.close()
        for socket in ("kv.pub", "kv.replay"):
            (folder / socket).unlink(missing_ok=True)
        second = FakeEngine(folder, base=100, at_s=2000.0)
        await second.publish(2)  # before the subscriber is back
        await until(sink, [100, 101])
        assert events.connected == 2
        await second.publish(1)
        await until(sink, [100, 101, 102])
        await second.close()


async def test_replay_without_end_marker_does_not_hang_the_stream(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixpool_agent.kv_events.REPLAY_SILENCE_S", 0.05)
    sink, engine = Sink(), FakeEngine(folder)
    engine.end_marker = False
    await engine.publish(3)
    async with following(folder, sink) as events:
        await asyncio.wait_for(events.caught_up.wait(), 5)
        await engine.publish(1)
        await until(sink, [0, 1, 2, 3])
    await engine.close()


async def test_unreadable_batch_is_a_loss_not_the_end(folder: Path) -> None:
    sink, engine = Sink(), FakeEngine(folder)
    async with following(folder, sink) as events:
        await asyncio.wait_for(events.caught_up.wait(), 5)
        await engine.publish(1)
        await until(sink, [0])
        await engine._pub.send_multipart([b"kv", (1).to_bytes(8, "big"), b"\xc1nonsense"])
        engine.next_seq = 2
        await engine.publish(1)
        await until(sink, [2])
        assert len(sink.losses) == 1
    await engine.close()


@pytest.mark.parametrize(
    ("seq", "at_s", "verdict"),
    [
        (5, 9.0, Verdict.NEXT),
        (7, 9.0, Verdict.GAP),
        (3, 5.0, Verdict.DUPLICATE),
        (0, 9.0, Verdict.RESTARTED),
    ],
)
def test_live_batches_are_placed(seq: int, at_s: float, verdict: Verdict) -> None:
    assert Order(next_seq=5, last_s=8.0).judge(seq, at_s) is verdict


def test_batch_is_an_array_of_maps() -> None:
    payload = msgspec.msgpack.encode([12.5, [{"type": "AllBlocksCleared"}], 1])
    assert decode_batch(payload) == Batch(12.5, [{"type": "AllBlocksCleared"}], 1)


@pytest.mark.parametrize("batch", [[], [1.0], ["x", []], [1.0, [["BlockStored", 1]]], 5])
def test_other_formats_are_refused_by_name(batch: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_batch(msgspec.msgpack.encode(batch))
