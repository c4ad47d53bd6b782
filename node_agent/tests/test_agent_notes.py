"""The notes server: several gates, rings sent again, nothing twice, nothing of another engine start."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prefixpool import note
from prefixpool_agent.notes import Notes

EPOCH = 7


class Sink:
    def __init__(self) -> None:
        self.got: list[str] = []
        self.greeted: list[note.GateHello] = []
        self.bad = 0

    def arrival(self, arrival: note.Arrival) -> None:
        self.got.append(f"arrival {arrival.id}")

    def end(self, end: note.End) -> None:
        self.got.append(f"end {end.id}")

    def cache_reset(self, reset: note.CacheReset) -> None:
        self.got.append(f"reset {reset.at_s}")

    def hello(self, hello: note.GateHello) -> None:
        self.greeted.append(hello)

    def note_bad(self) -> None:
        self.bad += 1


class GateClient:
    """What a gate does: connects again and again, and begins each connection with its whole ring."""

    def __init__(self, path: Path, *, epoch: int = EPOCH, pid: int = 1, version: int = note.VERSION) -> None:
        self._path, self._epoch, self._pid, self._version = path, epoch, pid, version
        self.ring: list[note.FromGate] = []
        self.commands: list[note.ToGate] = []
        self.connections = 0
        self.withheld = 0  # notes of the ring that are sent late

    async def connect(self) -> None:
        self.reader, self.writer = await asyncio.open_unix_connection(self._path)
        self.connections += 1
        hello = note.GateHello(
            version=self._version, epoch=self._epoch, pid=self._pid, dropped=3, ring=len(self.ring) + self.withheld
        )
        self.writer.write(note.frame(hello))
        for message in self.ring:
            self.writer.write(note.frame(message))
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (length,) = note.LENGTH.unpack(await self.reader.readexactly(4))
                self.commands.append(note.decode_to_gate(await self.reader.readexactly(length)))
        self.writer.close()
        if self.connections < 5:
            with contextlib.suppress(OSError):
                await self.connect()

    def send(self, message: note.FromGate) -> None:
        self.ring.append(message)
        self.writer.write(note.frame(message))

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.writer.close()


def arrival(id_: str) -> note.Arrival:
    return note.Arrival(id=id_, at_s=1.0, path="/v1/completions", body=b"{}")


def end(id_: str) -> note.End:
    return note.End(id=id_, first_s=1.5, at_s=2.0, status=200, body=b"{}")


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
async def server(tmp_path: Path, sink: Sink) -> AsyncIterator[Notes]:
    made = Notes(tmp_path / "notes.sock", sink)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def gate(tmp_path: Path, server: Notes) -> AsyncIterator[GateClient]:
    made = GateClient(tmp_path / "notes.sock")
    await made.connect()
    yield made
    await made.close()


async def until(sink: Sink, expected: list[str]) -> None:
    async with asyncio.timeout(5):
        while sink.got != expected:  # noqa: ASYNC110  the sink is not asynchronous
            await asyncio.sleep(0.002)


async def until_connected(server: Notes, gates: int) -> None:
    async with asyncio.timeout(5):
        while server.gates != gates:  # noqa: ASYNC110  the server does not announce it
            await asyncio.sleep(0.002)


async def test_notes_arrive_in_order(server: Notes, gate: GateClient, sink: Sink) -> None:
    server.begin(EPOCH)
    for message in (arrival("a"), arrival("b"), end("a"), note.CacheReset(at_s=3.0)):
        gate.send(message)
    await until(sink, ["arrival a", "arrival b", "end a", "reset 3.0"])
    assert sink.greeted[0].dropped == 3
    assert server.gates == 1


async def test_notes_before_the_epoch_is_known_come_with_the_ring(server: Notes, gate: GateClient, sink: Sink) -> None:
    gate.send(arrival("early"))
    await asyncio.sleep(0.02)
    assert sink.got == []
    server.begin(EPOCH)
    await until(sink, ["arrival early"])


async def test_end_that_is_under_way_when_the_epoch_begins_does_not_overtake_its_arrival(
    server: Notes, gate: GateClient, sink: Sink
) -> None:
    gate.send(arrival("a"))
    await asyncio.sleep(0.02)  # read, and dropped
    gate.send(end("a"))
    server.begin(EPOCH)
    await until(sink, ["arrival a", "end a"])


async def test_ring_that_is_sent_again_is_taken_once(server: Notes, gate: GateClient, sink: Sink, tmp_path: Path) -> None:
    server.begin(EPOCH)
    gate.send(arrival("a"))
    gate.send(note.CacheReset(at_s=3.0))
    gate.send(end("a"))
    await until(sink, ["arrival a", "reset 3.0", "end a"])
    again = GateClient(tmp_path / "notes.sock")
    again.ring = [*gate.ring, arrival("b")]
    await again.connect()
    await until(sink, ["arrival a", "reset 3.0", "end a", "arrival b"])
    await again.close()


async def test_several_gates_reset_at_the_same_time_are_told_apart(
    server: Notes, gate: GateClient, sink: Sink, tmp_path: Path
) -> None:
    other = GateClient(tmp_path / "notes.sock", pid=2)
    await other.connect()
    server.begin(EPOCH)
    gate.send(note.CacheReset(at_s=3.0))
    other.send(note.CacheReset(at_s=3.0))
    await until(sink, ["reset 3.0", "reset 3.0"])
    await other.close()


async def test_notes_of_another_engine_start_are_dropped(server: Notes, sink: Sink, tmp_path: Path) -> None:
    server.begin(EPOCH)
    old = GateClient(tmp_path / "notes.sock", epoch=EPOCH - 1)
    await old.connect()
    old.send(arrival("old"))
    ours = GateClient(tmp_path / "notes.sock")
    await ours.connect()
    ours.send(arrival("new"))
    await until(sink, ["arrival new"])
    assert server.send(note.Fence(True)) == 1
    await old.close()
    await ours.close()


async def test_commands_reach_every_gate(server: Notes, gate: GateClient, tmp_path: Path) -> None:
    other = GateClient(tmp_path / "notes.sock", pid=2)
    await other.connect()
    server.begin(EPOCH)
    async with asyncio.timeout(5):
        while server.send(note.ReportFull(5)) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        while not all(note.ReportFull(5) in g.commands for g in (gate, other)):  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    await other.close()


@pytest.mark.parametrize(
    "frame",
    [
        note.LENGTH.pack(note.MAX_FRAME_BYTES + 1),  # would need as much memory as its sender likes
        note.LENGTH.pack(3) + b"\xc1\xc1\xc1",
        note.frame(note.Resend()),  # a command in the wrong direction
    ],
)
async def test_nonsense_closes_the_connection_and_spares_the_others(
    server: Notes, gate: GateClient, sink: Sink, tmp_path: Path, frame: bytes
) -> None:
    server.begin(EPOCH)
    bad = GateClient(tmp_path / "notes.sock")
    await bad.connect()
    bad.writer.write(frame)
    async with asyncio.timeout(5):
        while not sink.bad:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    gate.send(arrival("fine"))
    await until(sink, ["arrival fine"])
    await bad.close()


async def test_note_that_trips_a_bug_does_not_cost_the_others(
    server: Notes, gate: GateClient, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(end: note.End) -> None:
        raise RecursionError

    monkeypatch.setattr(sink, "end", fail)
    server.begin(EPOCH)
    for message in (arrival("a"), end("a"), arrival("b")):
        gate.send(message)
    await until(sink, ["arrival a", "arrival b"])
    assert sink.bad == 1


async def test_other_version_is_not_served(server: Notes, sink: Sink, tmp_path: Path) -> None:
    server.begin(EPOCH)
    other = GateClient(tmp_path / "notes.sock", version=note.VERSION + 1)
    await other.connect()
    async with asyncio.timeout(5):
        while not sink.bad:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    assert server.gates == 0
    await other.close()


async def test_socket_of_an_agent_that_died_is_replaced(tmp_path: Path, sink: Sink) -> None:
    path = tmp_path / "notes.sock"
    path.write_bytes(b"")
    server = Notes(path, sink)
    await server.start()
    assert path.stat().st_mode & 0o777 == 0o600
    await server.stop()
    assert not path.exists()


async def test_memory_of_ids_is_bounded(
    server: Notes, gate: GateClient, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefixpool_agent.notes.SEEN_IDS", 10)
    server.begin(EPOCH)  # before the gate has greeted: nothing is sent twice
    for i in range(100):
        gate.send(arrival(str(i)))
    await until(sink, [f"arrival {i}" for i in range(100)])
    assert len(server._seen) == 20


async def test_past_is_caught_up_with_once_every_gate_has_told_its_whole_ring(tmp_path: Path, server: Notes) -> None:
    quick, slow = GateClient(tmp_path / "notes.sock"), GateClient(tmp_path / "notes.sock", pid=2)
    quick.ring, slow.ring, slow.withheld = [arrival("a"), end("a")], [arrival("b")], 1
    await quick.connect()
    await slow.connect()
    await until_connected(server, 2)
    server.begin(EPOCH)
    await until_connected(server, 2)
    await asyncio.sleep(0.02)
    assert not server.caught_up.is_set()
    slow.send(end("b"))
    await asyncio.wait_for(server.caught_up.wait(), 5)
    server.begin(EPOCH + 1)
    assert not server.caught_up.is_set()
    await quick.close()
    await slow.close()


async def test_gate_that_remembers_nothing_is_caught_up_with_at_once(server: Notes, gate: GateClient) -> None:
    server.begin(EPOCH)
    await asyncio.wait_for(server.caught_up.wait(), 5)
