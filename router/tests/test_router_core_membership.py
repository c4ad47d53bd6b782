"""Membership: flags, and a file that is read again on change."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prefixpool.errors import SettingsError
from prefixpool_router.membership import FileMembers, Member, MemberState, StaticMembers, check_members, members_from_flags
from prefixpool_testing.edge import until


@pytest.mark.parametrize("first", [["a=http://h:1", "http://h:2"], ["a=http://h:1,http://h:2"]])
def test_flags_name_engine_and_agent(first: list[str]) -> None:
    members = members_from_flags([*first, "b=https://x.example:8443/"])
    assert members == (
        Member(name="a", engine="http://h:1", agent="http://h:2"),
        Member(name="b", engine="https://x.example:8443"),
    )


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (["http://h:1"], "expected NAME=ENGINE_URL"),
        (["nonsense"], "expected NAME=ENGINE_URL"),
        (["a=http://h:1", "http://h:2", "http://h:3"], "expected NAME=ENGINE_URL"),
        (["a=ftp://h:1"], "engine URL 'ftp://h:1'"),
        (["a=http://h:1/v1"], "without a path"),
        (["a=http://h:0"], "expected http://HOST:PORT"),
        (["a=http://h:port"], "expected http://HOST:PORT"),
        (["a=http://a..b:1"], "expected http://HOST:PORT"),  # ended the router once it was probed
        ([f"a=http://{'x' * 64}:1"], "expected http://HOST:PORT"),
        (["a=http://h h:1"], "expected http://HOST:PORT"),
        (["a=http://u:p@h:1"], "expected http://HOST:PORT"),
        (["a/b=http://h:1"], "replica name 'a/b'"),
        (["a=http://h:1", "a=http://h:2"], "a is listed twice"),
    ],
)
def test_wrong_flags_are_named(values: list[str], says: str) -> None:
    with pytest.raises(SettingsError, match=says.replace("/", "/")):
        members_from_flags(values)


async def test_a_static_list_is_one_set() -> None:
    updates = StaticMembers([Member(name="a", engine="http://h:1")]).updates()
    assert [m.name for m in await anext(updates)] == ["a"]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(updates), 0.02)


def write(path: Path, *members: dict[str, str]) -> None:
    path.write_text(json.dumps(list(members)))


def write_raw(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "members.json"
    write(path, {"name": "a", "engine": "http://h:1", "agent": "http://h:2"})
    return path


async def following(updates: AsyncIterator[tuple[Member, ...]]) -> tuple[Member, ...]:
    return await asyncio.wait_for(anext(updates), 2)


async def test_a_file_is_read_again_on_change(file: Path) -> None:
    source = FileMembers(file, 0.01)
    updates = source.updates()
    assert [m.state for m in await following(updates)] == [MemberState.READY]
    write(file, {"name": "a", "engine": "http://h:1", "state": "terminating"}, {"name": "b", "engine": "http://h:3"})
    assert [(m.name, m.state) for m in await following(updates)] == [
        ("a", MemberState.TERMINATING),
        ("b", MemberState.READY),
    ]
    assert source.problem == ""


@pytest.mark.parametrize(
    "host",
    [
        "h",
        "h.example",
        "h.example.",
        "a_b",
        "10.0.0.1",
        "[::1]",
        "[fe80::1%25eth0]",
        "b\N{LATIN SMALL LETTER U WITH DIAERESIS}cher.example",
    ],
)
def test_hosts_of_every_kind_are_taken(host: str) -> None:
    assert members_from_flags([f"a=http://{host}:1"])[0].engine == f"http://{host}:1"


async def test_a_member_whose_host_no_name_can_be_ended_all_routers(file: Path) -> None:
    source = FileMembers(file, 0.01)
    updates = source.updates()
    await following(updates)
    write(file, {"name": "b", "engine": "http://h..example:1"})
    pending = asyncio.ensure_future(anext(updates))
    await until(lambda: "engine URL 'http://h..example:1'" in source.problem)
    pending.cancel()


def become_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


async def test_a_pipe_in_place_of_the_member_file_hung_the_router_for_ever(file: Path) -> None:
    source = FileMembers(file, 0.01)
    updates = source.updates()
    await following(updates)
    become_pipe(file)
    pending = asyncio.ensure_future(anext(updates))
    await until(lambda: "not a regular file" in source.problem)
    pending.cancel()


@pytest.mark.parametrize("broken", ["", "{}", '[{"name": "a"}]', '[{"name":"a","engine":"x"}]', '[{"nome": "a"}]', "\xff"])
async def test_a_broken_file_keeps_the_last_set_and_says_so(file: Path, broken: str) -> None:
    source = FileMembers(file, 0.01)
    updates = source.updates()
    await following(updates)
    write_raw(file, broken.encode("latin-1"))
    pending = asyncio.ensure_future(anext(updates))
    await asyncio.sleep(0.04)
    assert not pending.done()
    assert str(file) in source.problem
    write(file, {"name": "c", "engine": "http://h:1"})
    assert [m.name for m in await asyncio.wait_for(pending, 2)] == ["c"]
    assert source.problem == ""


async def test_a_file_that_vanishes_and_returns_unchanged_is_no_problem_any_more(file: Path) -> None:
    source = FileMembers(file, 0.01)
    updates = source.updates()
    await following(updates)
    pending = asyncio.ensure_future(anext(updates))
    write_raw(file, None)
    await asyncio.sleep(0.04)
    assert "No such file" in source.problem
    write(file, {"name": "a", "engine": "http://h:1", "agent": "http://h:2"})
    await asyncio.sleep(0.04)
    assert source.problem == ""
    assert not pending.done()
    pending.cancel()
    await asyncio.gather(pending, return_exceptions=True)


def test_names_are_identities_not_addresses() -> None:
    with pytest.raises(SettingsError, match="listed twice"):
        check_members([Member(name="a", engine="http://h:1"), Member(name="a", engine="http://h:1")])
