"""The agent's side of a disk tier that is slow, full, or gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from prefixpool import names
from prefixpool.wire import Costs
from prefixpool_agent import saved_map
from prefixpool_agent.disk_folder import DiskFolder
from prefixpool_agent.disk_follower import DiskFollower
from prefixpool_agent.follower import Follower
from prefixpool_agent.saved_map import SavedMap
from prefixpool_agent.tiers.disk_store import DiskStore, Limits
from prefixpool_agent.tiers.trail import GROUP_BYTES, Place
from prefixpool_agent.tiers.worth import recompute
from prefixpool_testing.eventually import eventually

SAVED = SavedMap(version=saved_map.VERSION, costs=Costs(), residency=b"")


class FakeFollower:
    """Remembers what it hears."""

    def __init__(self) -> None:
        self.residency = SimpleNamespace(lives=1)
        self.following = True
        self.store = ""
        self.found: list[Any] = []
        self.maps: list[list[bytes]] = []

    def disk(self, maps: list[bytes], found: list[Any], gone: list[int]) -> None:
        self.found += found
        self.maps += [maps] if maps else []

    def mounts(self, store: str) -> None:
        self.store = store


@pytest.fixture
def chunks(tmp_path: Path) -> DiskStore:
    """A directory with one chunk, of which an engine told in its run directory."""
    made = DiskStore(tmp_path / "kv", b"m" * 16, Limits(1 << 30, 0, True), recompute)
    made.open()
    made.write(b"k" * 32 + bytes(GROUP_BYTES), Place(b"", 16), b"kv")
    (tmp_path / names.RUN_DISK_FOLDER).write_text(str(made.folder))
    return made


@asynccontextmanager
async def following(run_dir: Path) -> AsyncIterator[tuple[DiskFollower, FakeFollower]]:
    follower = FakeFollower()
    disk = DiskFollower(run_dir, "a", cast(Follower, follower), shared=True)
    looking = asyncio.create_task(disk.run())
    try:
        yield disk, follower
    finally:
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking


async def test_what_lay_on_a_disk_that_could_not_be_named_was_never_told(chunks: DiskStore, tmp_path: Path) -> None:
    (chunks.folder / "maps").write_text("no folder")
    async with following(tmp_path) as (_, follower):
        await eventually(lambda: _is(len(follower.found) == 1), what="the chunk is told")
        assert not follower.store


async def test_maps_of_many_replicas_were_taken_over_in_one_go_while_nothing_else_ran(
    chunks: DiskStore, tmp_path: Path
) -> None:
    for replica in ("b", "c", "d"):
        DiskFolder(chunks.folder).save(replica, msgspec.structs.replace(SAVED, residency=replica.encode()))
    async with following(tmp_path) as (_, follower):
        await eventually(lambda: _is(len(follower.found) == 1), what="the chunk is told")
        assert follower.maps == [[b"b"], [b"c"], [b"d"]]


async def test_each_save_on_a_disk_that_hangs_took_a_thread_until_none_was_left(
    chunks: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, begun = threading.Event(), threading.Semaphore(0)

    def save(*_: object) -> None:
        begun.release()
        hangs.wait()

    monkeypatch.setattr(DiskFolder, "save", save)
    async with following(tmp_path) as (disk, _):
        await eventually(lambda: _is(disk.follows), what="the folder is found")
        try:
            for _ in range(50):
                await disk.save(SAVED, at_once=True)
            await eventually(lambda: _is(begun.acquire(blocking=False)), what="a save begins")
            assert not begun.acquire(blocking=False), "one more began"
        finally:
            hangs.set()


async def _is(condition: bool) -> bool:
    return condition
