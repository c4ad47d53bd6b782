"""The count of a directory's bytes, put right by a walk while chunks come and go."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixpool_agent.tiers.disk_account import Account
from prefixpool_agent.tiers.disk_ledger import Ledger, StoreError

SIZE, CHUNKS = 100, 6

Step = tuple[str, int]  # what is done with which chunk


class Disk:
    """A directory with one writer; `seen` is what a walk finds of a chunk at that moment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.account = Account(Ledger(folder, 1 << 30))
        self.writing: set[int] = set()

    def path(self, chunk: int) -> Path:
        return self.folder / f"{chunk}.kv"

    @property
    def true_bytes(self) -> int:
        return SIZE * sum(self.path(chunk).exists() or chunk in self.writing for chunk in range(CHUNKS))

    def do(self, what: str, chunk: int) -> None:
        there, id_ = self.path(chunk).exists(), bytes([chunk])
        if what == "reserve" and not there and chunk not in self.writing:
            assert self.account.reserve(id_, SIZE)
            self.writing.add(chunk)
        elif what == "appear" and chunk in self.writing:
            self.path(chunk).write_bytes(bytes(SIZE))
        elif what == "written" and chunk in self.writing and there:
            self.writing.discard(chunk)
            self.account.written(id_)
        elif what == "give back" and chunk in self.writing and not there:
            self.writing.discard(chunk)
            self.account.give_back(id_, SIZE)
        elif what == "remove" and chunk not in self.writing:
            self.account.remove(id_, SIZE, self.path(chunk))

    def walk(self, steps: list[Step]) -> Iterator[tuple[bytes, int]]:
        """Chunks are looked at one by one, in the middle of everything."""
        for what, chunk in steps:
            if what != "look at":
                self.do(what, chunk)
            elif self.path(chunk).exists():
                yield bytes([chunk]), SIZE


ACTIONS = ("reserve", "appear", "written", "give back", "remove")
CHUNK = st.integers(0, CHUNKS - 1)
STEPS = st.lists(st.tuples(st.sampled_from(ACTIONS), CHUNK), max_size=20)


@given(STEPS, STEPS, st.permutations(range(CHUNKS)), st.lists(st.integers(0, 20), min_size=CHUNKS, max_size=CHUNKS))
def test_whatever_this_process_does_meanwhile_the_count_is_right(
    before: list[Step], during: list[Step], order: list[int], at: list[int]
) -> None:
    steps = list(during)
    for chunk, place in zip(order, at, strict=True):
        steps.insert(place, ("look at", chunk))
    with TemporaryDirectory() as folder:
        disk = Disk(Path(folder))
        for step in before:
            disk.do(*step)
        disk.account.recount(lambda: disk.walk(steps))
        assert disk.account.used == disk.true_bytes


def test_chunks_evicted_during_a_count_are_not_taken_off_twice(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    for chunk in range(3):
        for what in ("reserve", "appear", "written"):
            disk.do(what, chunk)
    disk.account.recount(lambda: disk.walk([("remove", 1), *(("look at", chunk) for chunk in range(3))]))
    assert disk.account.used == 2 * SIZE


def test_files_that_nobody_counted_are_and_those_that_vanished_are_not(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    for what in ("reserve", "appear", "written"):
        disk.do(what, 0)
    disk.path(0).unlink()
    for chunk in (1, 2):
        disk.path(chunk).write_bytes(bytes(SIZE))
    disk.account.recount(lambda: disk.walk([("look at", chunk) for chunk in range(3)]))
    assert disk.account.used == 2 * SIZE


def test_a_walk_that_fails_changes_nothing_and_the_next_one_counts(tmp_path: Path) -> None:
    disk = Disk(tmp_path)

    def broken() -> Iterator[tuple[bytes, int]]:
        disk.do("reserve", 0)
        yield bytes([0]), 0
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        disk.account.recount(broken)
    disk.do("appear", 0)
    disk.do("written", 0)
    assert disk.account.used == SIZE
    disk.account.recount(lambda: disk.walk([("remove", 0), ("look at", 0)]))
    assert disk.account.used == 0


def test_a_count_that_could_not_be_read_for_a_moment_was_doubled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path)
    for chunk in range(3):
        for what in ("reserve", "appear", "written"):
            disk.do(what, chunk)
    opened, failures = os.open, iter([errno.EMFILE])

    def fails_once(path: Path, *rest: int) -> int:
        if (number := next(failures, 0)) and path.name == "used":
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *rest)

    monkeypatch.setattr(os, "open", fails_once)
    with pytest.raises(StoreError, match="Too many open files"):
        disk.account.recount(lambda: disk.walk([("look at", chunk) for chunk in range(3)]))
    assert disk.account.used == 3 * SIZE
