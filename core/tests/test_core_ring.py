"""The ring: fair, stable when members come and go, bounded, and telling what it did."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixpool.ring import BOUND, SLACK, Placement, Ring, bound

_DRAW = random.Random(1)
KEYS = [_DRAW.getrandbits(64) for _ in range(4000)]
MEMBERS = st.lists(st.text("abcdefgh-0123", min_size=1, max_size=8), min_size=2, max_size=24, unique=True)


def owner(ring: Ring, key: int) -> str:
    return next(ring.walk(key))


@given(MEMBERS, st.integers(0, 23))
def test_only_keys_of_the_member_that_left_move(names: list[str], which: int) -> None:
    leaver = names[which % len(names)]
    before, after = Ring(names), Ring(name for name in names if name != leaver)
    for key in KEYS[:200]:
        if owner(before, key) != leaver:
            assert owner(after, key) == owner(before, key)
        else:
            assert list(before.walk(key))[1] == owner(after, key), "they go to the next on the walk"


@pytest.mark.parametrize("members", [2, 3, 8, 64])
def test_about_one_nth_of_the_keys_moves_when_a_replica_joins(members: int) -> None:
    names = [f"pool-{i}" for i in range(members)]
    before, after = Ring(names), Ring([*names, f"pool-{members}"])
    moved = sum(owner(before, key) != owner(after, key) for key in KEYS) / len(KEYS)
    assert 0.6 / (members + 1) < moved < 1.5 / (members + 1)


@pytest.mark.parametrize("members", [2, 3, 5, 8, 16, 32, 64])
def test_every_member_owns_a_fair_part_of_the_keys(members: int) -> None:
    ring = Ring([f"pool-{i}" for i in range(members)])
    draw, counts, keys = random.Random(2), dict.fromkeys(ring.names, 0), 1000 * members
    for _ in range(keys):
        counts[owner(ring, draw.getrandbits(64))] += 1
    assert max(counts.values()) < 1.35 * keys / members
    assert min(counts.values()) > 0.7 * keys / members


def test_equal_on_every_router_whatever_the_order_of_members() -> None:
    names = [f"pool-{i}" for i in range(9)]
    assert [list(Ring(names).walk(key)) for key in KEYS[:50]] == [list(Ring(names[::-1]).walk(key)) for key in KEYS[:50]]


def test_places_are_committed() -> None:
    # Routers of two versions work side by side during a rollout: places must not change silently.
    ring = Ring(["pool-0", "pool-1", "pool-2"])
    places = "".join(owner(ring, key << 56)[-1] for key in range(0, 256, 24))
    assert places == "10100002010"


@given(MEMBERS, st.integers(0, 2**64 - 1))
def test_a_walk_meets_every_member_once(names: list[str], key: int) -> None:
    walked = list(Ring(names).walk(key))
    assert sorted(walked) == sorted(names)


def test_an_empty_ring_has_no_places() -> None:
    ring = Ring([])
    assert list(ring.walk(5)) == []
    assert ring.place(5, (), lambda _: True) == Placement("", "", 0)


def test_a_place_is_the_first_eligible_member_that_accepts() -> None:
    ring = Ring([f"pool-{i}" for i in range(5)])
    first, second, third, fourth, fifth = ring.walk(77)
    assert ring.place(77, set(ring.names), lambda _: True) == Placement(first, first, 0)
    assert ring.place(77, {second, third, fifth}, lambda name: name != second) == Placement(second, third, 1)
    assert ring.place(77, {fourth}, lambda _: False) == Placement(fourth, "", 1)


@given(st.integers(1, 20), st.lists(st.sampled_from(KEYS[:3]), max_size=300))
def test_bounded_loads_hold_for_any_sequence_of_hot_keys(members: int, keys: list[int]) -> None:
    ring = Ring([f"pool-{i}" for i in range(members)])
    loads = dict.fromkeys(ring.names, 0)
    for key in keys:
        limit = bound(sum(loads.values()), members)
        name = ring.place(key, loads, lambda name, limit=limit: loads[name] < limit).final  # type: ignore[misc]
        loads[name] += 1
        assert loads[name] <= BOUND * sum(loads.values()) / members + 1 + SLACK
