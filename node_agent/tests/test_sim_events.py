"""KV events over ZMQ as vLLM publishes them: frames, sequence numbers, replay."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from prefixpool.errors import SettingsError
from prefixpool_agent.sim.events import END_SEQUENCE, EventPublisher, KvEventsConfig
from prefixpool_agent.sim.settings import SimSettings

CLEARED = {"type": "AllBlocksCleared"}
DEADLINE_MS = 5000


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="pp") as path:  # pytest's own are too long for a unix socket
        yield Path(path)


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


@asynccontextmanager
async def publisher(folder: Path, **changes: Any) -> AsyncIterator[EventPublisher]:
    config = KvEventsConfig(
        **{
            "enable_kv_cache_events": True,
            "endpoint": f"ipc://{folder}/pub",
            "replay_endpoint": f"ipc://{folder}/replay",
            "topic": "kv",
            **changes,
        }
    )
    subject = EventPublisher(config)
    subject.open()
    try:
        yield subject
    finally:
        await subject.close()


@contextmanager
def socket(context: zmq.asyncio.Context, kind: int, endpoint: str) -> Iterator[zmq.asyncio.Socket]:
    made = context.socket(kind)
    made.setsockopt(zmq.RCVTIMEO, DEADLINE_MS)
    made.setsockopt(zmq.RCVHWM, 0)
    made.connect(endpoint)
    try:
        yield made
    finally:
        made.close(linger=0)


async def replay(context: zmq.asyncio.Context, folder: Path, start: int) -> list[list[bytes]]:
    """Frames of all answers to one request, the END marker included."""
    answers: list[list[bytes]] = []
    with socket(context, zmq.DEALER, f"ipc://{folder}/replay") as client:
        await client.send_multipart([b"", start.to_bytes(8, "big")])
        while not answers or answers[-1][2] != END_SEQUENCE:
            answers.append(await client.recv_multipart())
    return answers


async def test_a_subscriber_gets_topic_number_and_batch(folder: Path, context: zmq.asyncio.Context) -> None:
    batch = [CLEARED, {"type": "BlockRemoved", "block_hashes": [2**64 - 1], "medium": "GPU"}]
    async with publisher(folder) as subject:
        with socket(context, zmq.SUB, f"ipc://{folder}/pub") as subscriber:
            subscriber.subscribe(b"kv")
            number = 0
            while not await subscriber.poll(20):  # until the subscription has arrived
                subject.publish(batch)
                number += 1
            topic, received, payload = await subscriber.recv_multipart()
    assert topic == b"kv"
    assert int.from_bytes(received, "big") < number
    timestamp, events, rank = msgspec.msgpack.decode(payload)
    assert isinstance(timestamp, float)
    assert events == batch
    assert rank == 0


async def test_replay_starts_where_it_is_asked_to_and_ends_with_a_marker(folder: Path, context: zmq.asyncio.Context) -> None:
    async with publisher(folder) as subject:
        for _ in range(600):
            subject.publish([CLEARED])
        answers = await replay(context, folder, 590)
    assert [int.from_bytes(frames[2], "big") for frames in answers[:-1]] == list(range(590, 600))
    assert answers[0][:2] == [b"", b"kv"]
    assert answers[-1] == [b"", b"", END_SEQUENCE, b""]


async def test_only_the_last_buffer_steps_can_be_replayed(folder: Path, context: zmq.asyncio.Context) -> None:
    async with publisher(folder, buffer_steps=3) as subject:
        for _ in range(5):
            subject.publish([CLEARED])
        answers = await replay(context, folder, 0)
    assert [int.from_bytes(frames[2], "big") for frames in answers[:-1]] == [2, 3, 4]


async def test_several_replays_one_after_another(folder: Path, context: zmq.asyncio.Context) -> None:
    async with publisher(folder) as subject:
        assert len(await replay(context, folder, 0)) == 1
        subject.publish([CLEARED])
        assert len(await replay(context, folder, 0)) == 2
        assert len(await replay(context, folder, 1)) == 1


async def test_nonsense_at_the_replay_socket_is_ignored(folder: Path, context: zmq.asyncio.Context) -> None:
    async with publisher(folder):
        with socket(context, zmq.DEALER, f"ipc://{folder}/replay") as client:
            await client.send_multipart([b"x"])
        assert len(await replay(context, folder, 0)) == 1


async def test_a_step_without_events_is_no_batch(folder: Path, context: zmq.asyncio.Context) -> None:
    async with publisher(folder) as subject:
        subject.publish([])
        subject.publish([CLEARED])
        answers = await replay(context, folder, 0)
    assert [int.from_bytes(frames[2], "big") for frames in answers[:-1]] == [0]


async def test_without_events_nothing_is_bound(folder: Path) -> None:
    async with publisher(folder, enable_kv_cache_events=False) as subject:
        subject.publish([CLEARED])
        assert subject.describe() is None
        assert not os.listdir(folder)


def test_the_flag_takes_vllms_json_and_says_what_is_wrong_with_it() -> None:
    settings = SimSettings(model="m", kv_events_config='{"enable_kv_cache_events":true,"topic":"t"}')
    assert settings.events() == KvEventsConfig(enable_kv_cache_events=True, topic="t")
    with pytest.raises(SettingsError, match="--kv-events-config"):
        SimSettings(model="m", kv_events_config='{"buffer_steps":"x"}').events()
