"""Chunks as files: room, order of going, restarts, sharing, and whatever may happen to a disk."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from random import Random
from typing import Any

import pytest

from prefixpool_agent.tiers import chunk_io
from prefixpool_agent.tiers.chunk_file import HEAD_BYTES
from prefixpool_agent.tiers.disk_ledger import Failure, Removal, StoreError
from prefixpool_agent.tiers.disk_store import ABANDONED_S, DiskStore, Limits
from prefixpool_agent.tiers.trail import Place
from prefixpool_agent.tiers.worth import recompute

PAYLOAD = bytes(1000)
SIZE = HEAD_BYTES + len(PAYLOAD)
MODEL, OTHER = b"m" * 16, b"o" * 16


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        self.now_s += 1
        return self.now_s


Make = Callable[..., DiskStore]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    clock, made = Clock(), []

    def store(chunks: float = 100, *, namespace: bytes = MODEL, shared: bool = False, free: int = 0) -> DiskStore:
        one = DiskStore(tmp_path / "kv", namespace, Limits(int(chunks * SIZE), free, shared), recompute, clock)
        one.open()
        one.collect()
        made.append(one)
        return one

    yield store
    for one in made:
        one.close()


def key(i: int) -> bytes:
    return i.to_bytes(4, "big") + bytes(32)


def write(store: DiskStore, *numbers: int, parent: int | None = None) -> None:
    for i in numbers:
        place = Place(b"" if parent is None else key(parent), 32 if parent is None else 64)
        store.write(key(i), place, PAYLOAD)


def read(store: DiskStore, i: int) -> bytes:
    return bytes(store.read(key(i), bytearray(SIZE)))


def failure(store: DiskStore, what: Callable[..., Any], *arguments: Any) -> Failure:
    with pytest.raises(StoreError) as error:
        what(store, *arguments)
    return error.value.failure


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in (".kv", ".tmp"))


def on_disk(folder: Path) -> int:
    return sum(status.st_size for _, status in statuses(folder))


def on_disk_at_once(folder: Path) -> int:
    """Of files that were there all the while: others come and go while they are counted."""
    before = {(path, status.st_ino): status.st_size for path, status in statuses(folder)}
    after = {(path, status.st_ino) for path, status in statuses(folder)}
    return sum(size for file, size in before.items() if file in after)


def statuses(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in files(folder):
        with suppress(FileNotFoundError):  # it went meanwhile
            yield path, path.stat()


# -- room


def test_what_was_written_is_read_and_counted(make: Make, tmp_path: Path) -> None:
    store = make()
    write(store, 1, 2)
    assert read(store, 1) == PAYLOAD
    assert store.used == on_disk(tmp_path) == 2 * SIZE
    assert store.write(key(1), Place(), PAYLOAD) is False


def test_only_the_engines_user_may_read_what_prompts_said(make: Make, tmp_path: Path) -> None:
    write(make(), 1)
    assert (tmp_path / "kv" / MODEL.hex()).stat().st_mode & 0o777 == 0o700


def test_capacity_is_kept_and_the_longest_unused_goes(make: Make, tmp_path: Path) -> None:
    store = make(chunks=10)
    for i in range(30):
        write(store, i)
        assert on_disk(tmp_path) <= 10 * SIZE
    left = [i for i in range(30) if store.holds(key(i))]
    assert left == list(range(30 - len(left), 30))
    assert store.used == on_disk(tmp_path)
    assert store.take_removed() == [key(i) for i in range(30 - len(left))]


def test_a_prefix_goes_from_its_end(make: Make) -> None:
    store = make(chunks=10)
    write(store, 0)
    for i in range(1, 5):
        write(store, i, parent=i - 1)
    write(store, *range(10, 18))
    kept = [i for i in range(5) if store.holds(key(i))]
    assert kept == list(range(len(kept)))


def test_free_space_of_the_file_system_is_left_to_others(make: Make, tmp_path: Path) -> None:
    before = make()
    write(before, 1)
    before.close()
    wanting = make(free=1 << 60)
    assert failure(wanting, write, 2) is Failure.DISK_FULL
    assert wanting.counts["evicted_free_space"] == 1
    assert not (tmp_path / "kv" / MODEL.hex() / "00" / f"{key(2).hex()}.kv").exists()


def test_chunk_larger_than_the_capacity_is_refused(make: Make, tmp_path: Path) -> None:
    assert failure(make(chunks=0.5), write, 1) is Failure.FULL
    assert on_disk(tmp_path) == 0


def test_accounting_is_right_after_much_churn(make: Make, tmp_path: Path) -> None:
    store, draw = make(chunks=50), Random(1)
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(5000):
        i = draw.randrange(400)
        if store.holds(key(i)):
            assert read(store, i) == PAYLOAD
        else:
            write(store, i)
    assert store.used == on_disk(tmp_path) == len(store) * SIZE <= 50 * SIZE
    assert len(os.listdir("/proc/self/fd")) == descriptors


# -- restarts


def test_restart_knows_what_is_there_and_what_it_takes(make: Make, tmp_path: Path) -> None:
    before = make()
    write(before, 1, 2, 3)
    before.close()
    (tmp_path / "kv" / "used").write_bytes(b"\0" * 8)  # as if it had been lost
    after = make()
    assert [read(after, i) for i in (1, 2, 3)] == [PAYLOAD] * 3
    assert after.used == 3 * SIZE


def test_last_use_outlives_a_restart(make: Make) -> None:
    before = make(chunks=4)
    write(before, 1, 2, 3)
    read(before, 1)
    for i, at in ((1, 30.0), (2, 10.0), (3, 20.0)):
        os.utime(before._path(MODEL + key(i)), (at, at))
    before.close()
    after = make(chunks=4)
    write(after, 4, 5)
    assert not after.holds(key(2))
    assert after.holds(key(1))


WRITER = """
import sys; from pathlib import Path
from prefixpool_agent.tiers.disk_store import DiskStore, Limits
from prefixpool_agent.tiers.trail import Place
from prefixpool_agent.tiers.worth import recompute
store = DiskStore(Path(sys.argv[1]), b"m" * 16, Limits(1 << 30, 0, sys.argv[2] == "shared"), recompute); store.open()
print("ready", flush=True)
for i in range(10**9): store.write(i.to_bytes(4, "big") + bytes(32), Place(), bytes(4_000_000))
"""


def writer(folder: Path, shared: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(folder), shared], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def killed_in_the_middle(writer: subprocess.Popen[bytes], folder: Path) -> None:
    with writer as process:
        while not any(path.suffix == ".tmp" for path in files(folder)) or on_disk(folder) == 0:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)


def test_writer_killed_in_the_middle_leaves_nothing_half_written(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    killed_in_the_middle(writer(folder, "alone"), folder)
    before = {path for path in files(folder) if path.suffix == ".kv"}
    store = make(chunks=1e6)
    assert set(files(folder)) == before
    assert store.used == on_disk(folder)
    buffer = bytearray(8_000_000)
    for path in before:
        assert len(store.read(bytes.fromhex(path.stem), buffer)) == 4_000_000


def test_rest_of_a_writer_killed_beside_others_is_counted_until_it_goes(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    while not (rests := list(folder.rglob("*.tmp"))):  # it may have ended that file before it died
        killed_in_the_middle(writer(folder, "shared"), folder)
    (rest,) = rests
    store = make(chunks=1e6, shared=True)
    assert store.used == on_disk(folder)
    os.utime(rest, (1_000_000 - ABANDONED_S, 1_000_000 - ABANDONED_S))
    store.collect()
    assert not rest.exists()
    assert store.used == on_disk(folder)


# -- what may happen to a file


def test_flipped_bit_is_a_miss_and_the_file_goes(make: Make, tmp_path: Path) -> None:
    store = make()
    write(store, 1)
    (path,) = files(tmp_path)
    data = bytearray(path.read_bytes())
    data[-7] ^= 4
    path.write_bytes(data)
    assert failure(store, read, 1) is Failure.CORRUPT
    assert files(tmp_path) == []
    assert (store.used, store.holds(key(1)), store.take_removed()) == (0, False, [key(1)])


@pytest.mark.parametrize("length", [0, HEAD_BYTES - 1, HEAD_BYTES, SIZE - 1])
def test_file_cut_short_is_a_miss(make: Make, tmp_path: Path, length: int) -> None:
    store = make()
    write(store, 1)
    os.truncate(files(tmp_path)[0], length)
    assert failure(store, read, 1) is Failure.CORRUPT
    assert not store.holds(key(1))


def test_vanished_file_is_a_miss(make: Make, tmp_path: Path) -> None:
    store = make()
    write(store, 1)
    files(tmp_path)[0].unlink()
    assert failure(store, read, 1) is Failure.ABSENT
    assert store.take_removed() == [key(1)]


def test_files_of_others_are_let_be(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    (folder / "notes.kv").write_bytes(b"mine")
    (folder / "notes.txt").write_bytes(b"mine")
    store = make(chunks=2)
    write(store, 1, 2, 3)
    assert (folder / "notes.kv").read_bytes() == b"mine"


def test_temporary_files_of_others_in_the_directory_were_removed_and_counted(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "kv" / "downloads"
    folder.mkdir(parents=True)
    (folder / "half.tmp").write_bytes(bytes(100 * SIZE))
    store = make(chunks=2)
    assert (folder / "half.tmp").exists()
    assert store.used == 0
    write(store, 1)


# -- what may happen to a disk


@pytest.mark.parametrize(
    ("number", "expected"),
    [(errno.ENOSPC, Failure.DISK_FULL), (errno.EDQUOT, Failure.DISK_FULL), (errno.EROFS, Failure.READ_ONLY),
     (errno.EACCES, Failure.DENIED), (errno.EIO, Failure.BROKEN)],
)  # fmt: skip
def test_failed_write_leaves_nothing_behind(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: Failure
) -> None:
    store = make()

    def fails(descriptor: int, buffers: list[bytes]) -> int:
        os.write(descriptor, buffers[0])
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(chunk_io.os, "writev", fails)
    assert failure(store, write, 1) is expected
    assert files(tmp_path) == []
    assert (store.used, store.holds(key(1))) == (0, False)


def test_lost_permission_says_so_and_chunks_are_read_on(make: Make, tmp_path: Path) -> None:
    store = make()
    write(store, 1)
    for folder in (tmp_path, *takewhile(lambda above: "pytest" in str(above), tmp_path.parents)):
        folder.chmod(0o755)
    for path in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)
    try:
        assert failure(store, write, 2) is Failure.DENIED
        assert read(store, 1) == PAYLOAD
        assert failure(store, DiskStore.open) is Failure.DENIED
    finally:
        os.seteuid(was)
        (tmp_path / "kv").chmod(0o700)


def test_deleted_directory_is_empty_and_made_again(make: Make, tmp_path: Path) -> None:
    store = make()
    write(store, 1)
    shutil.rmtree(tmp_path / "kv")
    assert failure(store, read, 1) is Failure.ABSENT
    with pytest.raises(StoreError):
        write(store, 2)
    store.collect()
    assert (store.used, len(store)) == (0, 0)
    write(store, 1)
    assert read(store, 1) == PAYLOAD
    assert make(shared=True).holds(key(1))


def test_directory_made_again_by_others_has_one_collector(make: Make, tmp_path: Path) -> None:
    one = make(shared=True)
    shutil.rmtree(tmp_path / "kv")
    two = make(shared=True)
    one.collect()
    assert (one._ledger._collector is None) != (two._ledger._collector is None)


def test_chunk_written_during_a_scan_is_not_forgotten(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make()
    listed = DiskStore._files

    def late(self: DiskStore, *suffixes: str) -> Iterator[Path]:
        yield from listed(self, *suffixes)
        write(store, 1)

    monkeypatch.setattr(DiskStore, "_files", late)
    store.scan()
    assert store.holds(key(1))


@pytest.mark.parametrize("which", ["the directory", "one folder of it"])
def test_disk_that_failed_during_a_look_lost_its_collector_or_chunks(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """The thread that looks after the directory ended, or what was not listed counted as gone."""
    store = make()
    write(store, 1, 2)
    broken = tmp_path / "kv" if which == "the directory" else files(tmp_path)[0].parent
    scandir = os.scandir

    def fails(path: str | os.PathLike[str]) -> Any:
        if Path(path) == broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return scandir(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", fails)
        assert failure(store, DiskStore.collect) is Failure.BROKEN
    assert (store.used, len(store), store.take_removed()) == (2 * SIZE, 2, [])
    store.collect()
    assert (store.used, len(store)) == (2 * SIZE, 2)


# -- several engines


def test_what_one_wrote_another_reads(make: Make) -> None:
    one, two = make(shared=True), make(shared=True)
    write(one, 1)
    assert not two.holds(key(1))
    assert two.exists(key(1))
    assert read(two, 1) == PAYLOAD
    assert two.write(key(1), Place(), PAYLOAD) is False
    assert one.used == SIZE


def test_together_they_keep_one_capacity(make: Make, tmp_path: Path) -> None:
    one, two = make(chunks=10, shared=True), make(chunks=10, shared=True)
    refused = 0
    for i in range(40):
        for store, number in ((one, i), (two, 1000 + i)):
            try:
                write(store, number)
            except StoreError as error:
                refused += error.failure is Failure.FULL
        assert on_disk(tmp_path) <= 10 * SIZE
        if i % 5 == 4:
            one.collect()  # the collector; the other may only wait for it
    assert one.counts["evicted_capacity"] > 0
    assert two.counts["evicted_capacity"] == 0
    assert one.used == on_disk(tmp_path)


def test_two_models_share_a_directory_and_nothing_else(make: Make, tmp_path: Path) -> None:
    one, two = make(chunks=10, shared=True), make(chunks=10, namespace=OTHER, shared=True)
    write(one, *range(5))
    assert not two.exists(key(1))
    assert failure(two, read, 1) is Failure.ABSENT
    write(two, 100)
    assert not one.exists(key(100))
    one.collect()
    one._evict(10 * SIZE, Removal.CAPACITY)
    assert files(tmp_path) == [], "the collector looks after all models"
    assert (one.counts["evicted_capacity"], one.counts["evicted_foreign"]) == (5, 1)


def test_collector_that_died_is_replaced(make: Make) -> None:
    one, two = make(chunks=4, shared=True), make(chunks=4, shared=True)
    write(one, 1, 2, 3, 4)
    assert failure(two, write, 5) is Failure.FULL
    one.close()
    two.collect()
    write(two, 5)
    assert two.counts["evicted_capacity"] > 0


def test_beside_a_collector_that_writes_nothing_others_could_write_no_more(make: Make) -> None:
    idle, busy = make(chunks=20, shared=True), make(chunks=20, shared=True)
    write(busy, *range(20))
    assert failure(busy, write, 20) is Failure.FULL
    idle.collect()
    write(busy, 20)
    assert read(busy, 20) == PAYLOAD


def test_temporary_file_of_a_living_writer_is_let_be(make: Make, tmp_path: Path) -> None:
    one = make(shared=True)
    write(one, 1)
    young = files(tmp_path)[0].with_name("aa.7-b-c.tmp")
    old = young.with_name("bb.7-b-c.tmp")
    for path, age_s in ((young, 0), (old, ABANDONED_S + 100)):
        path.write_bytes(b"half")
        os.utime(path, (1_000_000 - age_s, 1_000_000 - age_s))
    one.collect()
    assert (young.exists(), old.exists()) == (True, False)


def test_writers_readers_and_a_collector_at_once_lose_and_break_nothing(make: Make, tmp_path: Path) -> None:
    store = make(chunks=20, shared=True)
    other = make(chunks=20, shared=True)
    broken: list[Failure] = []

    def churn(mine: DiskStore, seed: int) -> None:
        draw, buffer = Random(seed), bytearray(SIZE)
        for _ in range(1500):
            i = draw.randrange(60)
            try:
                if mine.exists(key(i)):
                    assert bytes(mine.read(key(i), buffer)) == PAYLOAD
                else:
                    mine.write(key(i), Place(), PAYLOAD)
            except StoreError as error:
                if error.failure not in (Failure.ABSENT, Failure.FULL):
                    broken.append(error.failure)

    threads = [threading.Thread(target=churn, args=(one, i)) for i, one in enumerate((store, other, store, other))]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        store.collect()
        assert on_disk_at_once(tmp_path) <= (20 + 4) * SIZE, "one file a writer beyond the capacity, at most"
    assert broken == []
    store.collect()
    assert store.used == on_disk(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_long_churn_leaves_accounting_descriptors_and_memory_as_they_were(make: Make, tmp_path: Path) -> None:
    """100,000 chunks through room for 500; until 70,000 the memory of what was evicted grows to its size."""
    store, draw, buffer = make(chunks=500), Random(1), bytearray(SIZE)

    def churn(numbers: range) -> None:
        for i in numbers:
            assert store.write(key(i), Place(key(i - 1) if i % 16 else b"", 32 * (i % 16)), PAYLOAD)
            again = i - draw.randrange(600)
            if i % 4 == 0 and store.holds(key(again)):
                assert store.read(key(again), buffer) == PAYLOAD
        store.take_removed()

    churn(range(1_000, 71_000))
    descriptors, memory = len(os.listdir("/proc/self/fd")), resident_bytes()
    churn(range(71_000, 101_000))
    assert store.used == on_disk(tmp_path) == len(store) * SIZE <= 500 * SIZE
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert resident_bytes() < memory + 8_000_000


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
