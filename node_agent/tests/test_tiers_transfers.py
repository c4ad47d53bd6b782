"""Jobs of I/O threads: the scheduler never waits for them, and a job given up touches nothing any more."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixpool_agent.tiers.chunk_file import HEAD_BYTES
from prefixpool_agent.tiers.disk_store import DiskStore, Limits
from prefixpool_agent.tiers.mover import PAUSE_S, StoreMover
from prefixpool_agent.tiers.trail import Place
from prefixpool_agent.tiers.transfers import Ended, Part, Transfers
from prefixpool_agent.tiers.worth import recompute

ROW = 64
PATIENCE_S = 20.0


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Gated:
    """A mover whose reads and writes wait until they may go on."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = threading.Semaphore(0)
        self.written: dict[bytes, bytes] = {}
        self.left: list[bytes] = []

    def fetch(self, part: Part, buffer: bytearray) -> memoryview | None:
        self.begun.release()
        self.go.wait(PATIENCE_S)
        if part.key.startswith(b"bad"):
            return None
        buffer[:ROW] = part.key[:1] * ROW
        return memoryview(buffer)[:ROW]

    def put(self, part: Part, payload: memoryview) -> bool:
        self.begun.release()
        self.go.wait(PATIENCE_S)
        self.written[part.key] = bytes(payload)
        return not part.key.startswith(b"bad")

    def leave(self, part: Part) -> None:
        self.left.append(part.key)


class Rig:
    def __init__(self) -> None:
        self.clock, self.mover, self.pool = Clock(), Gated(), bytearray(8 * ROW)
        self.transfers = Transfers(
            self.mover,
            memoryview(self.pool),
            row_bytes=ROW,
            readers=2,
            writers=1,
            deadline_s=1.0,
            write_deadline_s=10.0,
            clock=self.clock,
        )

    def submit(self, *keys: bytes, is_read: bool = True, id_: int = 1, row: int = 0) -> None:
        self.transfers.submit(id_, [Part(key, row + i) for i, key in enumerate(keys)], is_read=is_read)

    def ended(self) -> Ended:
        wait = threading.Event()
        for _ in range(int(PATIENCE_S / 0.01)):
            if found := self.transfers.ended():
                assert len(found) == 1
                return found[0]
            wait.wait(0.01)
        raise AssertionError("no job ended")

    def row(self, number: int) -> bytes:
        return bytes(self.pool[number * ROW : (number + 1) * ROW])


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.mover.go.set()
    made.transfers.stop()


def test_read_puts_each_chunk_in_its_row(rig: Rig) -> None:
    rig.submit(b"a1", b"b2", row=3)
    assert rig.transfers.ended() == []
    rig.mover.go.set()
    end = rig.ended()
    assert (end.whole, end.done, end.late) == (True, (b"a1", b"b2"), False)
    assert (rig.row(3), rig.row(4), rig.row(5)) == (b"a" * ROW, b"b" * ROW, bytes(ROW))
    assert not rig.transfers.busy


def test_what_could_be_read_is_told_of_a_job_that_failed(rig: Rig) -> None:
    rig.mover.go.set()
    rig.submit(b"a", b"bad", b"c")
    end = rig.ended()
    assert (end.whole, end.done) == (False, (b"a", b"c"))


def test_read_that_hangs_is_given_up_and_its_row_is_left_alone(rig: Rig) -> None:
    rig.submit(b"a", b"b", b"c")
    rig.mover.begun.acquire(timeout=PATIENCE_S)
    rig.mover.begun.acquire(timeout=PATIENCE_S)
    rig.clock.now_s = 1.5
    (end,) = rig.transfers.ended()
    assert (end.late, end.done, end.whole) == (True, (), False)
    assert rig.transfers.stalled, "both readers hang"
    rig.pool[: 3 * ROW] = b"x" * 3 * ROW  # the rows have another owner now
    rig.mover.go.set()
    rig.clock.now_s = 1.6
    rig.submit(b"d", id_=2, row=5)
    assert rig.ended().id == 2
    assert rig.pool[: 3 * ROW] == b"x" * 3 * ROW
    assert not rig.transfers.stalled


def test_write_takes_its_row_before_it_waits_for_the_disk(rig: Rig) -> None:
    rig.pool[:ROW] = b"a" * ROW
    rig.submit(b"a", is_read=False)
    rig.mover.begun.acquire(timeout=PATIENCE_S)
    rig.clock.now_s = 11.0
    (end,) = rig.transfers.ended()
    assert end.late
    rig.pool[:ROW] = b"x" * ROW
    rig.mover.go.set()
    rig.submit(b"next", is_read=False, id_=2)
    rig.ended()
    assert rig.mover.written[b"a"] == b"a" * ROW


def test_places_of_chunks_whose_write_was_given_up_were_kept_for_ever(rig: Rig) -> None:
    rig.submit(b"a", b"b", b"c", is_read=False)
    rig.mover.begun.acquire(timeout=PATIENCE_S)
    rig.clock.now_s = 11.0
    (end,) = rig.transfers.ended()
    assert end.late
    rig.mover.go.set()
    rig.submit(b"next", is_read=False, id_=2)
    rig.ended()
    assert rig.mover.left == [b"b", b"c"]
    assert rig.mover.written.keys() == {b"a", b"next"}


def test_giving_up_all_waits_for_nothing(rig: Rig) -> None:
    rig.submit(b"a")
    rig.submit(b"b", is_read=False, id_=2)
    assert {end.id for end in rig.transfers.give_up_all()} == {1, 2}
    assert not rig.transfers.busy


# -- on a disk


def test_round_trip_and_a_rest_behind_a_failure(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "kv", b"m" * 16, Limits(2 * (ROW + HEAD_BYTES), 0, False), recompute)
    store.open()
    clock, asked = Clock(), []
    mover = StoreMover(store, lambda: asked.append(1), clock)
    mover.place({b"one": Place(b"", 32), b"two": Place(b"one", 64)})
    assert [mover.put(Part(key, 0), memoryview(bytes(ROW))) for key in (b"one", b"two")] == [True, True]
    assert mover.fetch(Part(b"one", 0), bytearray(ROW + HEAD_BYTES)) == bytes(ROW)
    assert mover.fetch(Part(b"none", 0), bytearray(ROW + HEAD_BYTES)) is None
    (tmp_path / "kv" / "used").unlink()
    (tmp_path / "kv" / "used").mkdir()  # whatever: it cannot be counted
    assert mover.put(Part(b"three", 0), memoryview(bytes(ROW))) is False
    assert not mover.takes_writes
    assert mover.put(Part(b"four", 0), memoryview(bytes(ROW))) is False
    assert mover.counts == {"written": 2, "read": 1, "read_absent": 1, "write_broken": 1, "write_skipped": 1}
    assert asked == [1]
    clock.now_s = PAUSE_S
    assert mover.takes_writes
    store.close()
