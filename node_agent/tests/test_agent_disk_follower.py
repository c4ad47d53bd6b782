"""The agent's side of a disk tier that is slow, full, hung, or gone."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest

from prefixpool import names
from prefixpool.wire import DiskCause
from prefixpool_agent.disk_folder import DiskFolder, Seen
from prefixpool_agent.disk_follower import DiskFollower
from prefixpool_agent.disk_maps import DiskMaps
from prefixpool_agent.follower import Follower
from prefixpool_agent.residency import saved
from prefixpool_agent.residency.kv_event import block_hash
from prefixpool_agent.residency.saved import Kind
from prefixpool_agent.tiers.disk_store import DiskStore, Limits
from prefixpool_agent.tiers.trail import GROUP_BYTES, Place
from prefixpool_agent.tiers.worth import recompute
from prefixpool_testing.eventually import eventually

KIND = Kind(16, "template")
KEY = b"k" * 32 + bytes(GROUP_BYTES)
BLOCK = block_hash(KEY[:-GROUP_BYTES])
LATE_S = 0.05
PATIENCE_S = 20.0  # what hangs would hang for ever


class FakeResidency:
    """News to be told, and counts."""

    def __init__(self) -> None:
        self.kind = KIND
        self.lives = 1
        self.counts: dict[str, int] = {"map_damaged": 0, "map_later": 0}
        self.news: list[Any] = []

    def take_news(self) -> list[Any]:
        taken, self.news = self.news, []
        return taken


class FakeFollower:
    """Remembers what it hears."""

    def __init__(self) -> None:
        self.residency = FakeResidency()
        self.following = True
        self.store = ""
        self.found: list[Any] = []
        self.maps: list[list[bytes]] = []
        self.portions: list[int] = []

    def disk(self, maps: list[bytes], found: list[Any], gone: list[int]) -> None:
        self.found += found
        self.portions.append(len(found))
        self.maps += [maps] if maps else []

    def mounts(self, store: str) -> None:
        self.store = store


@pytest.fixture
def chunks(tmp_path: Path) -> DiskStore:
    """A directory with one chunk, of which an engine told in its run directory."""
    made = DiskStore(tmp_path / "kv", b"m" * 16, Limits(1 << 30, 0, True), recompute)
    made.open()
    made.write(KEY, Place(b"", 16), b"kv")
    (tmp_path / names.RUN_DISK_FOLDER).write_text(str(made.folder))
    return made


@asynccontextmanager
async def following(run_dir: Path) -> AsyncIterator[tuple[DiskFollower, FakeFollower]]:
    follower = FakeFollower()
    disk = DiskFollower(run_dir, cast(Follower, follower), shared=True, late_s=LATE_S)
    looking = asyncio.create_task(disk.run())
    try:
        yield disk, follower
    finally:
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking


class Hung:
    """A chunk that hangs whoever opens it, as a mount does whose server is gone."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "ab" / f"{'ab' * 32}{'00' * GROUP_BYTES}.kv"
        self._path.parent.mkdir()
        os.mkfifo(self._path)

    def answer(self) -> None:
        """With nothing, which is no chunk; later looks do not find it."""
        writer = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)
        self._path.unlink()
        os.close(writer)


def told(folder: Path) -> set[int]:
    maps = DiskMaps(folder, KIND, shared=True).read().maps
    return {block for one in maps for block, _ in saved.load(one, KIND) or ()}


async def is_(condition: bool) -> bool:
    return condition


async def test_what_lay_on_a_disk_that_could_not_be_named_was_never_told(chunks: DiskStore, tmp_path: Path) -> None:
    (chunks.folder / "maps").write_text("no folder")
    async with following(tmp_path) as (disk, follower):
        await eventually(lambda: is_(len(follower.found) == 1), what="the chunk is told")
        assert not follower.store
        await eventually(lambda: is_(disk.problem is not None), what="it is told as failing")


async def test_maps_of_many_replicas_were_taken_over_in_one_go_while_nothing_else_ran(
    chunks: DiskStore, tmp_path: Path
) -> None:
    for i in range(3):
        DiskMaps(chunks.folder, KIND, shared=True).write([(BLOCK, [i, 16])], {BLOCK})
    async with following(tmp_path) as (_, follower):
        await eventually(lambda: is_(len(follower.maps) == 3), what="the maps are told")
        assert [len(maps) for maps in follower.maps] == [1, 1, 1]


async def test_maps_were_read_again_for_each_start_of_the_engine(chunks: DiskStore, tmp_path: Path) -> None:
    DiskMaps(chunks.folder, KIND, shared=True).write([(BLOCK, [1, 16])], {BLOCK})
    async with following(tmp_path) as (disk, follower):
        await eventually(lambda: is_(len(follower.maps) == 1), what="the map is told")
        follower.residency.lives += 1
        disk.soon()
        await eventually(lambda: is_(len(follower.found) == 2), what="the chunks are told to the new picture")
        assert len(follower.maps) == 1


async def test_large_directory_kept_the_event_loop_busy_for_seconds(
    chunks: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefixpool_agent.disk_follower.PORTION", 2)
    keys = [bytes([i]) * 32 + bytes(GROUP_BYTES) for i in range(4)]
    for i, key in enumerate(keys):
        chunks.write(key, Place(keys[i - 1] if i else b"", 16 * (i + 1)), b"kv")
    async with following(tmp_path) as (_, follower):
        await eventually(lambda: is_(len(follower.found) == 5), what="the chunks are told")
    assert max(follower.portions) == 2
    told_at = {block.hash: at for at, block in enumerate(follower.found)}
    assert all(block.parent is None or told_at[block.parent] < told_at[block.hash] for block in follower.found)


async def test_what_a_predecessor_has_told_is_not_told_again(chunks: DiskStore, tmp_path: Path) -> None:
    DiskMaps(chunks.folder, KIND, shared=True).write([(BLOCK, [1, 16])], {BLOCK})
    async with following(tmp_path) as (_, follower):
        follower.residency.news = [(BLOCK, [1, 16])]
        await eventually(lambda: is_(bool(follower.store)), what="one look is over")
    assert len(list((chunks.folder / "maps").glob("*.map"))) == 1


def test_texts_of_chunks_that_could_not_be_read_for_a_moment_were_forgotten(chunks: DiskStore) -> None:
    (path,) = chunks.folder.rglob("*.kv")
    content = path.read_bytes()
    path.write_bytes(b"")
    folder = DiskFolder(chunks.folder)
    assert not folder.look()
    assert folder.known == folder.lying() == {BLOCK}
    path.write_bytes(content)
    assert [block.hash for block in folder.look().found] == [BLOCK]
    assert folder.known == {BLOCK}


async def test_what_is_learned_is_told_beside_the_chunks(chunks: DiskStore, tmp_path: Path) -> None:
    async with following(tmp_path) as (_, follower):
        follower.residency.news = [(BLOCK, [1, 16]), (99, [2, 16])]
        await eventually(lambda: is_(told(chunks.folder) == {BLOCK}), what="what lies there is told")


async def test_what_a_dead_engine_had_learned_is_told_at_once(chunks: DiskStore, tmp_path: Path) -> None:
    async with following(tmp_path) as (disk, follower):
        await eventually(lambda: is_(bool(follower.store)), what="one look is over")
        other = b"o" * 32 + bytes(GROUP_BYTES)
        chunks.write(other, Place(KEY, 32), b"kv")  # it died before it could tell of this one
        follower.following = False
        follower.residency.news = [(BLOCK, [1, 16]), (block_hash(other[:-GROUP_BYTES]), [2, 32])]
        disk.soon()
        await eventually(lambda: is_(len(told(chunks.folder)) == 2), what="all is told")


async def test_an_agent_that_ends_tells_what_it_has_learned(chunks: DiskStore, tmp_path: Path) -> None:
    async with following(tmp_path) as (disk, follower):
        await eventually(lambda: is_(bool(follower.store)), what="one look is over")
        follower.residency.news = [(BLOCK, [1, 16])]
    await disk.close()
    assert told(chunks.folder) == {BLOCK}


async def test_disk_that_hangs_was_waited_for_by_whoever_ended(chunks: DiskStore, tmp_path: Path) -> None:
    hung = Hung(chunks.folder)
    async with following(tmp_path) as (disk, follower):
        await eventually(lambda: is_(disk.problem is not None), what="it is told")
        assert disk.problem is not None
        assert disk.problem.cause is DiskCause.HANGS
        threads = threading.active_count()
        for _ in range(20):
            disk.soon()
            await asyncio.sleep(0.005)
        assert threading.active_count() == threads, "each look took another thread"
        hung.answer()
        await eventually(lambda: is_(len(follower.found) == 1 and disk.problem is None), what="it is well again")


async def test_agent_ends_while_its_disk_hangs(chunks: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixpool_agent.disk_follower.CLOSE_S", LATE_S)
    hung = Hung(chunks.folder)
    async with following(tmp_path) as (disk, _):
        await eventually(lambda: is_(disk.problem is not None), what="it is told")
    async with asyncio.timeout(PATIENCE_S):
        await disk.close()
    hung.answer()


def test_process_ends_while_a_disk_hangs(tmp_path: Path) -> None:
    """Threads of the loop, and all that are no daemons, are waited for at the end of a process."""
    os.mkfifo(tmp_path / "hangs")
    program = (
        "import asyncio, sys\n"
        "from prefixpool_agent.disk_thread import asked\n"
        "async def main():\n"
        "    asked(lambda: open(sys.argv[1]).read())\n"
        "    await asyncio.sleep(0.1)\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "hangs")], check=True, timeout=30)


class SlowFolder(DiskFolder):
    """Gets further between any two glances at it, and is not done before it is told to."""

    over: threading.Event

    def __init__(self, folder: Path) -> None:
        self.glances = 0
        super().__init__(folder)

    @property
    def steps(self) -> int:
        self.glances += 1
        return self.glances

    @steps.setter
    def steps(self, _: int) -> None:
        pass

    def look(self) -> Seen:
        self.over.wait()
        return super().look()


async def test_large_directory_on_a_slow_disk_does_not_count_as_hung(
    chunks: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefixpool_agent.disk_follower.DiskFolder", SlowFolder)
    over = SlowFolder.over = threading.Event()
    async with following(tmp_path) as (disk, follower):
        try:
            await eventually(lambda: is_(disk._folder is not None and disk._folder.glances > 5), what="it takes long")
            assert disk.problem is None
        finally:
            over.set()
        await eventually(lambda: is_(len(follower.found) == 1), what="the chunk is told")


async def test_directory_that_is_gone_is_told_until_it_is_back(chunks: DiskStore, tmp_path: Path) -> None:
    away = chunks.folder.rename(tmp_path / "away")
    async with following(tmp_path) as (disk, follower):
        await eventually(lambda: is_(disk.problem is not None), what="it is told")
        away.rename(chunks.folder)
        disk.soon()
        await eventually(lambda: is_(len(follower.found) == 1 and disk.problem is None), what="it is well again")


async def test_engine_without_a_disk_tier_is_no_problem(tmp_path: Path) -> None:
    async with following(tmp_path) as (disk, _):
        await asyncio.sleep(LATE_S)
        assert disk.problem is None


async def test_file_that_the_engine_was_just_writing_named_the_working_directory(
    chunks: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(chunks.folder)
    (tmp_path / names.RUN_DISK_FOLDER).write_text("")
    async with following(tmp_path) as (_, follower):
        await asyncio.sleep(LATE_S)
        assert not follower.found
        assert not follower.store


async def test_damaged_map_is_counted(chunks: DiskStore, tmp_path: Path) -> None:
    (chunks.folder / "maps").mkdir()
    (chunks.folder / "maps" / "0123456789abcdef.1-1.map").write_bytes(b"cut sho")
    async with following(tmp_path) as (_, follower):
        await eventually(lambda: is_(follower.residency.counts["map_damaged"] == 1), what="it is counted")


async def test_map_of_a_later_version_is_told_as_such(
    chunks: DiskStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (chunks.folder / "maps").mkdir()
    (chunks.folder / "maps" / "0123456789abcdef.1-1.map").write_bytes(b"PPMAP002 of whatever kind")
    async with following(tmp_path) as (_, follower):
        await eventually(lambda: is_(follower.residency.counts["map_later"] == 1), what="it is counted")
    assert follower.residency.counts["map_damaged"] == 0
    assert "of a later version: not read, and left alone" in caplog.text
