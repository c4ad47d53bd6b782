"""Maps of texts beside the chunks: told once, read once, no larger than what lies there, and never lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixpool_agent import disk_maps, map_segment
from prefixpool_agent.disk_maps import BEAT_S, LEASE_S, DiskMaps
from prefixpool_agent.map_segment import Numbers, Segment
from prefixpool_agent.residency import saved
from prefixpool_agent.residency.saved import Kind

KIND = Kind(16, "template")
Facts = dict[int, set[tuple[int, int]]]


class Clock:
    """Stands still but for `pass_s`."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def row(block: int) -> tuple[int, list[int]]:
    """A block's facts: two boundaries."""
    return block, [block * 10, block, block * 10 + 1, block]


def rows(*blocks: int) -> list[tuple[int, list[int]]]:
    return [row(block) for block in blocks]


def facts(maps: Iterable[bytes]) -> Facts:
    out: Facts = {}
    for one in maps:
        for block, pairs in saved.load(one, KIND) or ():
            out.setdefault(block, set()).update(zip(pairs[::2], pairs[1::2], strict=True))
    return out


def expected(*blocks: int) -> Facts:
    return facts([saved.dump(KIND, rows(*blocks))])


def agent(folder: Path, clock: Clock, *, shared: bool = True) -> DiskMaps:
    return DiskMaps(folder, KIND, shared=shared, clock=clock)


def newcomer(folder: Path) -> Facts:
    """What an agent finds that has just started."""
    return facts(DiskMaps(folder, KIND, shared=True).read().maps)


def files(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder / "maps") if name.endswith(".map"))


def size(folder: Path) -> int:
    return sum((folder / "maps" / name).stat().st_size for name in files(folder))


# -- once


def test_each_replica_read_all_maps_of_all_others_again_and_again(tmp_path: Path, clock: Clock) -> None:
    agents = [agent(tmp_path, clock) for _ in range(4)]
    read = 0
    for turn in range(50):
        for i, each in enumerate(agents):
            read += len(facts(each.read().maps))
            each.write(rows(1000 * i + turn), range_of(5000))
    told = 4 * 50
    assert read <= 3 * told, "by each of the three others, once"
    assert newcomer(tmp_path) == expected(*(1000 * i + turn for i in range(4) for turn in range(50)))
    assert len(files(tmp_path)) <= 4 * 8


def range_of(count: int) -> set[int]:
    return set(range(count))


def test_maps_of_others_were_told_again_as_ones_own(tmp_path: Path, clock: Clock) -> None:
    first, second = agent(tmp_path, clock), agent(tmp_path, clock)
    first.write(rows(1, 2), {1, 2})
    before = files(tmp_path)
    second.read()
    second.write([], {1, 2})
    assert files(tmp_path) == before


def test_own_maps_are_not_read(tmp_path: Path, clock: Clock) -> None:
    one = agent(tmp_path, clock)
    one.write(rows(1), {1})
    assert one.read().maps == []


def test_what_another_told_meanwhile_is_not_told_twice(tmp_path: Path, clock: Clock) -> None:
    """An agent that comes back does not know what its predecessor has told."""
    first, second = agent(tmp_path, clock), agent(tmp_path, clock)
    second.write(rows(1), set())
    first.write(rows(1), {1})
    before = files(tmp_path)
    second.read()
    second.write([], {1})
    assert files(tmp_path) == before
    assert not second.waiting


def test_agent_that_came_back_told_again_what_it_had_just_read(tmp_path: Path, clock: Clock) -> None:
    agent(tmp_path, clock).write(rows(1, 2), {1, 2, 3})
    before = files(tmp_path)
    one = agent(tmp_path, clock)
    assert facts(one.read(rows(1, 2, 3)).maps) == expected(1, 2)
    one.write([], {1, 2, 3})
    (new,) = set(files(tmp_path)) - set(before)
    assert set(facts([map_segment.opened((tmp_path / "maps" / new).read_bytes()) or b""])) == {3}


def test_large_map_kept_the_event_loop_busy_for_seconds(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent(tmp_path, clock).write(rows(*range(5)), range_of(5))
    monkeypatch.setattr(disk_maps, "PORTION", 2)
    maps = agent(tmp_path, clock).read().maps
    assert [len(facts([one])) for one in maps] == [2, 2, 1]
    assert facts(maps) == expected(*range(5))


def test_text_waits_for_its_chunk(tmp_path: Path, clock: Clock) -> None:
    one = agent(tmp_path, clock)
    one.write(rows(1, 2), {1})
    assert newcomer(tmp_path) == expected(1)
    assert one.waiting
    one.write([], {1, 2})
    assert newcomer(tmp_path) == expected(1, 2)
    assert not one.waiting


# -- bounded


def test_maps_grew_with_all_that_was_ever_there(tmp_path: Path, clock: Clock) -> None:
    one = agent(tmp_path, clock)
    most = 0
    for turn in range(100):
        lying = set(range(10 * turn, 10 * turn + 100))
        one.write(rows(*range(10 * turn + 90, 10 * turn + 100)), lying)
        most = max(most, size(tmp_path))
    assert most < 3 * len(saved.dump(KIND, rows(*range(100))))
    assert set(newcomer(tmp_path)) >= set(range(990, 1090)) & set(range(90, 1090))


def test_empty_directory_has_no_maps(tmp_path: Path, clock: Clock) -> None:
    one = agent(tmp_path, clock)
    one.write(rows(1, 2, 3), {1, 2, 3})
    one.write([], set())
    assert files(tmp_path) == []
    one.write(rows(4), {4})
    assert newcomer(tmp_path) == expected(4)


def test_agents_that_were_there_hear_what_is_told_after_all_had_gone(tmp_path: Path, clock: Clock) -> None:
    one, other = agent(tmp_path, clock), agent(tmp_path, clock)
    one.write(rows(1), {1})
    other.read()
    one.write([], set())
    one.write(rows(2), {2})
    assert facts(other.read().maps) == expected(2)


def test_what_waits_is_bounded(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_maps, "WAITING", 10)
    one = agent(tmp_path, clock)
    one.write(rows(*range(100)), set())
    one.write([], range_of(100))
    assert newcomer(tmp_path) == expected(*range(90, 100))


# -- dead writers


def test_maps_of_replicas_that_are_gone_for_good_stayed_for_ever(tmp_path: Path, clock: Clock) -> None:
    for i in range(20):
        agent(tmp_path, clock).write(rows(i, 100 + i), range_of(200))
    one = agent(tmp_path, clock)
    one.write([], range_of(20))
    clock.pass_s(LEASE_S)
    one.write([], range_of(20))
    assert len(files(tmp_path)) == 1
    assert newcomer(tmp_path) == expected(*range(20)), "what lies there is kept, what does not has gone"
    writers = {map_segment.writer(name) for name in os.listdir(tmp_path / "maps")} - {""}
    assert len(writers) == 1


def test_living_writer_is_left_alone(tmp_path: Path, clock: Clock) -> None:
    one, other = agent(tmp_path, clock), agent(tmp_path, clock)
    one.write(rows(1), {1})
    for turn in range(100):
        clock.pass_s(BEAT_S)
        other.write([], {1})
        one.write([], {1})
        for path in (tmp_path / "maps").glob("*.alive"):
            os.utime(path, ns=((1 << 62) + turn,) * 2)  # clocks of files are coarse
    assert [map_segment.writer(name) for name in files(tmp_path)] == [one._writer]


def test_predecessors_in_a_directory_of_ones_own_are_taken_over_at_once(tmp_path: Path, clock: Clock) -> None:
    for i in range(5):
        one = agent(tmp_path, clock, shared=False)
        one.read()
        one.write(rows(i), range_of(5))
    assert len(files(tmp_path)) <= 2
    assert newcomer(tmp_path) == expected(*range(5))


def test_two_that_take_over_at_once_lose_nothing(tmp_path: Path, clock: Clock) -> None:
    agent(tmp_path, clock).write(rows(1, 2), {1, 2})
    heirs = [agent(tmp_path, clock) for _ in range(2)]
    for each in heirs:
        each.write([], {1, 2})
    clock.pass_s(LEASE_S)
    for each in heirs:
        each.write([], {1, 2})
    assert newcomer(tmp_path) == expected(1, 2)
    assert len(files(tmp_path)) == 1


def test_writer_that_was_taken_for_dead_goes_on(tmp_path: Path, clock: Clock) -> None:
    sleeper, heir = agent(tmp_path, clock), agent(tmp_path, clock)
    sleeper.write(rows(1), {1})
    heir.write([], {1})
    clock.pass_s(LEASE_S)
    heir.write([], {1})
    sleeper.write(rows(2), {1, 2})
    assert newcomer(tmp_path) == expected(1, 2)
    assert facts(heir.read().maps) == expected(2)
    sleeper.write(rows(3), {3})  # its own first piece is gone when it tells the rest anew
    heir.write([], {3})
    assert newcomer(tmp_path) == expected(3)


def test_map_of_another_template_is_kept_while_its_chunks_are_there(tmp_path: Path, clock: Clock) -> None:
    other = Kind(16, "another template")
    DiskMaps(tmp_path, other, shared=True, clock=clock).write(rows(1), {1})
    one = agent(tmp_path, clock)
    one.write([], {1})
    clock.pass_s(LEASE_S)
    one.write([], {1})
    (told,) = DiskMaps(tmp_path, other, shared=True).read().maps
    assert saved.load(told, other) == rows(1)
    for _ in range(2):  # its other files went, which looks like a sign of life
        clock.pass_s(LEASE_S)
        one.write([], set())
    assert files(tmp_path) == []


def test_older_word_of_a_dead_writer_won_once_it_had_told_ten_times(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_maps, "MERGED", 100)
    dead = agent(tmp_path, clock)
    for turn in range(1, 12):
        dead.write([(turn, [77, 16 * turn])], range_of(20))
    one = agent(tmp_path, clock, shared=False)
    one.write([], range_of(20))
    assert newcomer(tmp_path) == {11: {(77, 16 * 11)}}


def test_part_that_outlived_its_merging_had_the_last_word(tmp_path: Path, clock: Clock) -> None:
    dead = agent(tmp_path, clock)
    for turn in range(1, 5):
        dead.write([(turn, [77, 16 * turn])], range_of(20))
        kept = {name: (tmp_path / "maps" / name).read_bytes() for name in files(tmp_path)}
    dead.write([], range_of(20))
    for name in sorted(kept)[1:2]:  # killed before it could remove that one
        (tmp_path / "maps" / name).write_bytes(kept[name])
    one = agent(tmp_path, clock, shared=False)
    one.write([], range_of(20))
    assert newcomer(tmp_path) == {4: {(77, 16 * 4)}}


# -- damage and death


def test_disk_that_had_turned_read_only_looked_well_but_for_one_look_a_minute(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = agent(tmp_path, clock)
    one.write(rows(1), {1})
    clock.pass_s(BEAT_S)

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(30, "read-only file system")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "touch", fails)
        for _ in range(3):
            with pytest.raises(OSError, match="read-only"):
                one.write([], {1})
    one.write([], {1})


def test_maps_that_were_deleted_under_a_running_agent_are_no_error(tmp_path: Path, clock: Clock) -> None:
    one = agent(tmp_path, clock)
    one.write(rows(1), {1})
    shutil.rmtree(tmp_path / "maps")
    clock.pass_s(BEAT_S)
    one.write(rows(2), {1, 2})
    clock.pass_s(BEAT_S)
    shutil.rmtree(tmp_path / "maps")
    one.write([], {1, 2})


@pytest.mark.parametrize("content", [b"", b"PPMAP001", b"PPMAP001" + bytes(16) + b"x", b"\xc1" * 1000])
def test_damaged_map_is_counted_once_and_goes_with_its_writer(tmp_path: Path, clock: Clock, content: bytes) -> None:
    writer = agent(tmp_path, clock)
    writer.write(rows(1), {1})
    (tmp_path / "maps" / files(tmp_path)[0]).write_bytes(content)
    one = agent(tmp_path, clock)
    assert one.read() == ([], 1, 0)
    assert one.read() == ([], 0, 0)
    one.write([], {1})
    clock.pass_s(LEASE_S)
    one.write([], {1})
    assert files(tmp_path) == []


def later_container(_: bytes) -> bytes:
    return b"PPMAP002" + os.urandom(100)


def later_facts(body: bytes) -> bytes:
    version, *rest = msgspec.msgpack.decode(body)
    return map_segment.seal(msgspec.msgpack.encode([version + 1, *map(str, rest), {"more": 1}]))


@pytest.mark.parametrize("later", [later_container, later_facts])
@pytest.mark.parametrize("shared", [True, False])
def test_maps_of_an_upgrade_that_was_undone_were_deleted_as_damaged(
    tmp_path: Path, clock: Clock, shared: bool, later: Callable[[bytes], bytes]
) -> None:
    agent(tmp_path, clock).write(rows(1), {1})
    (name,) = files(tmp_path)
    path = tmp_path / "maps" / name
    path.write_bytes(content := later(map_segment.opened(path.read_bytes()) or b""))
    one = agent(tmp_path, clock, shared=shared)
    assert one.read() == ([], 0, 1), "told once, and as what it is"
    assert one.read() == ([], 0, 0)
    for heir in (one, agent(tmp_path, clock, shared=shared)):  # the second one did not read it before
        heir.write(rows(2), {1, 2})
        clock.pass_s(LEASE_S)
        heir.write([], {1, 2})
    assert path.read_bytes() == content
    assert newcomer(tmp_path) == expected(2)


def test_flipped_bit_is_damage(tmp_path: Path, clock: Clock) -> None:
    agent(tmp_path, clock).write(rows(1), {1})
    path = tmp_path / "maps" / files(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    assert agent(tmp_path, clock).read() == ([], 1, 0)


def test_files_of_others_are_no_maps_and_stay(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "maps").mkdir()
    for name in ("p-0.map", "store.id", "notes.txt"):
        (tmp_path / "maps" / name).write_text("x")
    one = agent(tmp_path, clock)
    assert one.read() == ([], 1, 0)
    assert one.read() == ([], 0, 0)
    clock.pass_s(LEASE_S)
    one.write([], set())
    clock.pass_s(LEASE_S)
    one.write([], set())
    assert {"p-0.map", "store.id", "notes.txt"} <= set(os.listdir(tmp_path / "maps"))


def test_map_that_cannot_be_read_for_a_moment_is_not_lost(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent(tmp_path, clock).write(rows(1), {1})
    one = agent(tmp_path, clock)
    one.write([], {1})
    clock.pass_s(LEASE_S)

    def fails(*_: Any) -> bytes:
        raise OSError(5, "input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "read_bytes", fails)
        assert one.read() == ([], 0, 0)
        with pytest.raises(OSError, match="input/output"):
            one.write([], {1})
    assert facts(one.read().maps) == expected(1)
    clock.pass_s(BEAT_S)
    one.write([], {1})
    assert newcomer(tmp_path) == expected(1)


class _Killed(BaseException):
    """No handler sees it, as none sees a SIGKILL."""


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_killed_at_any_moment_what_was_told_is_still_told(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Deaths between any two changes of the directory, over several lives."""
    folder, clock = tmp_path_factory.mktemp("maps"), Clock()
    told: set[int] = set()
    lying: set[int] = set()
    for life in range(4):
        one = agent(folder, clock, shared=data.draw(st.booleans()))
        left = [data.draw(st.integers(0, 40))]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", lambda _: None)
            for name in ("replace", "unlink"):
                patch.setattr(Path, name, _mortal(getattr(Path, name), left))
            try:
                for turn in range(6):
                    block = 100 * life + turn
                    lying.add(block)
                    lying -= (gone := data.draw(st.sets(st.sampled_from(sorted(lying)), max_size=3)) - {block})
                    told -= gone
                    one.read()
                    clock.pass_s(data.draw(st.sampled_from([1.0, BEAT_S, LEASE_S])))
                    one.write(rows(block), lying)
                    told.add(block)
            except _Killed:
                pass
        assert newcomer(folder).keys() >= told


def _mortal(change: Any, left: list[int]) -> Any:
    def changed(*args: Any, **kwargs: Any) -> Any:
        if left[0] == 0:
            raise _Killed
        left[0] -= 1
        return change(*args, **kwargs)

    return changed


# -- pure


def test_last_word_holds_and_what_is_gone_is_left_out() -> None:
    parts = [[(1, [10, 5, 11, 6]), (2, [20, 30])], [(1, [10, 7]), (3, [20, 40])]]
    assert map_segment.merge(parts, {1, 2}) == [(1, [10, 7, 11, 6]), (2, [20, 30])]
    assert map_segment.merge(parts, {1, 2, 3}) == [(1, [10, 7, 11, 6]), (3, [20, 40])]


@pytest.mark.parametrize("name", ["store.id", "a.map", "0123456789abcdef.1.map", "0123456789abcdef.1-2.map.tmp", "x" * 999])
def test_other_names_are_no_pieces(name: str) -> None:
    assert map_segment.segment(name) is None


def test_name_of_a_piece_tells_whose_it_is_and_its_numbers() -> None:
    one = Segment("0123456789abcdef", 3, 17)
    assert map_segment.segment(str(one)) == one
    assert map_segment.writer(str(one)) == map_segment.writer(f"{one}.tmp") == one.writer


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 5))))
def test_numbers_know_what_was_read(ranges: list[tuple[int, int]]) -> None:
    numbers, read = Numbers(), set()
    for first, more in ranges:
        one = Segment("", first, first + more)
        assert numbers.has(one) == (set(range(first, first + more + 1)) <= read)
        numbers.add(one)
        read |= set(range(first, first + more + 1))
        assert numbers.has(one)
