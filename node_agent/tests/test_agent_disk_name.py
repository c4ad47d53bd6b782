"""The name of a shared directory: one for all who have it, kept when it is moved, and not that of a copy."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from prefixpool_agent.disk_name import FILE, DiskName


@pytest.fixture
def maps(tmp_path: Path) -> Path:
    made = tmp_path / "model" / "maps"
    made.parent.mkdir()
    return made


def asked_at_once(names: list[DiskName]) -> set[str]:
    with ThreadPoolExecutor(len(names)) as threads:
        return set(threads.map(DiskName.ask, names))


def test_directory_has_one_name_for_all_who_have_it(maps: Path, tmp_path: Path) -> None:
    (name,) = asked_at_once([DiskName(maps) for _ in range(8)])
    assert re.fullmatch("[0-9a-f]{32}", name)
    assert DiskName(maps).ask() == name
    assert [path.name for path in maps.iterdir()] == [FILE]
    assert DiskName(tmp_path / "others").ask() != name


def test_directory_without_hard_links_was_never_named(maps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "operation not supported")

    monkeypatch.setattr(os, "link", fails)
    names = [DiskName(maps) for _ in range(8)]
    asked_at_once(names)
    (name,) = {each.ask() for each in names}
    assert re.fullmatch("[0-9a-f]{32}", name)
    assert [path.name for path in maps.iterdir()] == [FILE]


def test_directory_that_is_made_anew_has_another_name(maps: Path) -> None:
    named = DiskName(maps)
    before = named.ask()
    shutil.rmtree(maps)
    assert named.ask() != before


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"x" * 5_000_000, b"g" * 32, b"0" * 32])
def test_a_broken_name_of_a_directory_ended_the_agent_or_was_told_to_all_routers(maps: Path, content: bytes) -> None:
    names = [DiskName(maps) for _ in range(8)]
    before = names[0].ask()
    (maps / FILE).write_bytes(content)
    asked_at_once(names)
    (name,) = {each.ask() for each in names}
    assert re.fullmatch("[0-9a-f]{32}", name)
    assert name != before
    assert [path.name for path in maps.iterdir()] == [FILE]


def test_copy_of_a_directory_kept_the_name_and_routers_took_both_for_one(
    maps: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = DiskName(maps).ask()
    shutil.copytree(maps.parent, tmp_path / "copy")
    copies = [DiskName(tmp_path / "copy" / "maps") for _ in range(8)]
    with caplog.at_level(logging.WARNING):
        asked_at_once(copies)
    (name,) = {each.ask() for each in copies}
    assert name != before
    assert "is a copy" in caplog.text
    caplog.clear()
    assert DiskName(maps).ask() == before
    assert DiskName(tmp_path / "copy" / "maps").ask() == name
    assert not caplog.records, "told once"


def test_directory_that_is_moved_keeps_its_name(maps: Path, tmp_path: Path) -> None:
    before = DiskName(maps).ask()
    maps.parent.rename(tmp_path / "moved")
    assert DiskName(tmp_path / "moved" / "maps").ask() == before


def test_where_each_sees_other_inodes_all_keep_one_name_in_the_end(maps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems number files as they please; replicas would rename the directory for ever."""
    names = [DiskName(maps) for _ in range(3)]
    for i, named in enumerate(names):
        monkeypatch.setattr(named, "_inodes", lambda _, i=i: f"{i}-{os.getpid()}")
    for _ in range(3):
        for named in names:
            named.ask()
    told = [named.ask() for named in names for _ in range(2)]
    assert len(set(told)) == 1
