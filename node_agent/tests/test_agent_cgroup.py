"""Memory of a container: what counts towards its limit, and the most that was seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixpool_agent.cgroup import MemoryWatch, kept_bytes, limit_bytes

STAT = "anon {anon}\nfile 900\nkernel 5\nshmem {shmem}\nfile_mapped 7\ninactive_anon 3\n"


class Group:
    """A cgroup's files."""

    def __init__(self, folder: Path, below: str = "") -> None:
        self.mount, self.own, self.shm = folder / "mount", folder / "own", folder / "shm"
        self.folder = self.mount / below
        self.folder.mkdir(parents=True)
        self.shm.mkdir()
        self.own.write_text(f"0::/{below}\n")
        self.watch = MemoryWatch(self.mount, self.own, self.shm)

    def uses(self, anon: int, shmem: int, limit: str = "max\n") -> None:
        (self.folder / "memory.stat").write_text(STAT.format(anon=anon, shmem=shmem))
        (self.folder / "memory.max").write_text(limit)


@pytest.mark.parametrize("below", ["", "user.slice/session-1.scope"])
def test_private_and_shared_memory_count_and_pages_of_files_do_not(tmp_path: Path, below: str) -> None:
    group = Group(tmp_path, below)
    group.uses(100, 20, "4096\n")
    found = group.watch.look()
    assert (found.used_bytes, found.limit_bytes) == (120, 4096)
    assert found.shared_limit_bytes > 0


def test_the_most_that_was_seen_is_remembered(tmp_path: Path) -> None:
    group = Group(tmp_path)
    seen = []
    for anon in (10, 50, 20):
        group.uses(anon, 0)
        found = group.watch.look()
        seen.append((found.used_bytes, found.most_used_bytes))
    assert seen == [(10, 10), (50, 50), (20, 50)]


def test_nothing_is_said_where_there_is_no_cgroup(tmp_path: Path) -> None:
    found = MemoryWatch(tmp_path / "none", tmp_path / "neither", tmp_path / "nor").look()
    assert (found.limit_bytes, found.used_bytes, found.most_used_bytes, found.shared_limit_bytes) == (0, 0, 0, 0)


def test_no_limit_is_zero() -> None:
    assert (limit_bytes("max\n"), limit_bytes(""), limit_bytes("8192\n")) == (0, 0, 8192)
    assert kept_bytes("") == 0


def test_this_process_is_in_some_group() -> None:
    assert MemoryWatch().look().shared_limit_bytes > 0
