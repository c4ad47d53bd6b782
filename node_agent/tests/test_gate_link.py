"""Notes on their way to the agent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prefixpool import note
from prefixpool_agent.gate.link import NoteLink, NoteRing


def counts(n: int) -> note.Counts:
    return note.Counts(inflight=n, fenced=False)


class Agent:
    """A listener on notes.sock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.connections: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        self.server: asyncio.Server | None = None
        self.writers: list[asyncio.StreamWriter] = []

    async def start(self) -> None:
        self.server = await asyncio.start_unix_server(self._accept, self.path)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        await self.connections.put((reader, writer))

    async def stop(self) -> None:
        assert self.server is not None
        self.server.close()
        for writer in self.writers:
            writer.close()
        self.path.unlink(missing_ok=True)


async def read(reader: asyncio.StreamReader) -> note.FromGate:
    async with asyncio.timeout(5):
        (length,) = note.LENGTH.unpack(await reader.readexactly(4))
        return note.decode_from_gate(await reader.readexactly(length))


@asynccontextmanager
async def linked(
    path: Path, ring: NoteRing | None = None, on_tick: Callable[[], None] = lambda: None
) -> AsyncIterator[tuple[NoteLink, list[note.ToGate]]]:
    commands: list[note.ToGate] = []
    link = NoteLink(
        path,
        hello=lambda dropped: note.GateHello(version=1, epoch=7, pid=9, dropped=dropped),
        on_command=commands.append,
        on_tick=on_tick,
        ring=ring,
    )
    task = asyncio.create_task(link.run())
    try:
        yield link, commands
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_ring_drops_the_oldest_beyond_its_bounds_and_counts_unsent_ones() -> None:
    ring = NoteRing(max_notes=3, max_bytes=100)
    for frame in (b"a", b"b", b"c", b"d"):
        ring.append(frame)
    assert ring.dropped == 1
    assert ring.take() == b"bcd"
    ring.append(b"e")
    assert ring.dropped == 1  # "b" fell out, but it had been sent
    assert ring.take() == b"e"
    ring.append(b"x" * 99)
    assert ring.take() == b"x" * 99
    ring.rewind()
    assert ring.take() == b"e" + b"x" * 99


def test_ring_takes_in_bounded_batches() -> None:
    ring = NoteRing()
    for _ in range(10):
        ring.append(b"x" * 10)
    assert [len(ring.take(25)) for _ in range(5)] == [30, 30, 30, 10, 0]


def test_one_frame_beyond_the_rings_bytes_is_dropped_not_kept() -> None:
    ring = NoteRing(max_bytes=10)
    ring.append(b"x" * 11)
    assert ring.take() == b""
    assert ring.dropped == 1


async def test_notes_written_before_the_agent_listens_arrive_in_order(tmp_path: Path) -> None:
    agent = Agent(tmp_path / "notes.sock")
    async with linked(agent.path) as (link, _):
        for n in range(5):
            link.put(counts(n))
        await asyncio.sleep(0.01)
        await agent.start()
        async with asyncio.timeout(5):
            reader, _ = await agent.connections.get()
        assert await read(reader) == note.GateHello(version=1, epoch=7, pid=9, ring=5)
        assert [await read(reader) for _ in range(5)] == [counts(n) for n in range(5)]
        link.put(counts(99))
        assert await read(reader) == counts(99)
        await agent.stop()


async def test_agent_that_comes_back_gets_the_ring_on_request(tmp_path: Path) -> None:
    agent = Agent(tmp_path / "notes.sock")
    await agent.start()
    async with linked(agent.path) as (link, _):
        link.put(counts(1))
        link.put(counts(2))
        async with asyncio.timeout(5):
            reader, writer = await agent.connections.get()
        assert [await read(reader) for _ in range(3)][1:] == [counts(1), counts(2)]
        writer.close()
        async with asyncio.timeout(5):
            reader, writer = await agent.connections.get()
        assert isinstance(await read(reader), note.GateHello)
        writer.write(note.frame(note.Resend()))
        assert [await read(reader) for _ in range(2)] == [counts(1), counts(2)]
        link.put(counts(3))
        assert await read(reader) == counts(3)
        await agent.stop()


async def test_commands_reach_the_gate(tmp_path: Path) -> None:
    agent = Agent(tmp_path / "notes.sock")
    await agent.start()
    async with linked(agent.path) as (_, commands):
        async with asyncio.timeout(5):
            _, writer = await agent.connections.get()
        writer.write(note.frame(note.Fence(on=True)) + note.frame(note.ReportFull(requests=3)))
        async with asyncio.timeout(5):
            while len(commands) < 2:  # noqa: ASYNC110 - the gate has no signal for it
                await asyncio.sleep(0.005)
        assert commands == [note.Fence(on=True), note.ReportFull(requests=3)]
        await agent.stop()


@pytest.mark.parametrize("nonsense", [b"\x00\x00\x00\x02\xff\xff", b"\xff\xff\xff\xff", b"\x00\x00\x00\x01\x05"])
async def test_nonsense_from_the_agent_only_reconnects(tmp_path: Path, nonsense: bytes) -> None:
    agent = Agent(tmp_path / "notes.sock")
    await agent.start()
    async with linked(agent.path) as (link, commands):
        async with asyncio.timeout(5):
            _, writer = await agent.connections.get()
            writer.write(nonsense)
            reader, _ = await agent.connections.get()
        assert isinstance(await read(reader), note.GateHello)
        link.put(counts(1))
        assert await read(reader) == counts(1)
        assert commands == []
        await agent.stop()


async def test_agent_that_never_reads_costs_bounded_memory_and_blocks_nobody(tmp_path: Path) -> None:
    agent = Agent(tmp_path / "notes.sock")
    await agent.start()
    ring = NoteRing(max_notes=100, max_bytes=1 << 20)
    async with linked(agent.path, ring) as (link, _):
        async with asyncio.timeout(5):
            await agent.connections.get()
        big = note.Arrival(id="x", at_s=0.0, path="/v1/completions", body=b"x" * 100_000)
        for _ in range(300):
            link.put(big)
            await asyncio.sleep(0)
        assert ring.dropped > 200
        await agent.stop()


@pytest.mark.parametrize("busy", [False, True])
async def test_ticks_come_whether_or_not_there_are_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    """Counts were late for as long as notes kept coming: another process's crash went unseen under load."""
    monkeypatch.setattr("prefixpool_agent.gate.link.TICK_S", 0.02)
    agent = Agent(tmp_path / "notes.sock")
    await agent.start()
    ticks: list[int] = []
    async with linked(agent.path, on_tick=lambda: ticks.append(1)) as (link, _):
        async with asyncio.timeout(5):
            await agent.connections.get()
            while len(ticks) < 3:
                if busy:
                    link.put(counts(1))
                await asyncio.sleep(0.001)
        await agent.stop()
