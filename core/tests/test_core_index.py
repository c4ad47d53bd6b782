"""The index against a model that keeps plain sets, its columns, its bound, and what it forgets first."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixpool.index import GIVE_UP, SHARDS, STRIDE, PrefixIndex, capacity
from prefixpool.levels import MAX_DEPTH, Level
from prefixpool.predicted import Predicted
from prefixpool.wire import Tier

BLOCK = 16
TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK)


def keys_of(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.getrandbits(64) for _ in range(count)]


def depths_of(count: int) -> range:
    return range(BLOCK, BLOCK * (count + 1), BLOCK)


def tiers_of(levels: Sequence[Level], columns: int) -> list[tuple[int, ...]]:
    """Tokens per column: on the device, in host memory or nearer, in any tier."""
    bits = [1 << 3 * column for column in range(columns)]
    return [
        tuple(max((level.tokens for level in levels if level[tier] & bit), default=0) for tier in (1, 2, 3)) for bit in bits
    ]


def found(levels: Sequence[Level], columns: int) -> list[tuple[int, int]]:
    """Tokens per column: on the device, in any tier."""
    return [(device, held) for device, _, held in tiers_of(levels, columns)]


@given(st.lists(st.tuples(*[st.integers(0, 60)] * 3), min_size=1, max_size=6), st.integers(1, 60), st.integers(0, 60))
def test_match_tells_how_deep_each_replica_holds_each_tier(
    holdings: list[tuple[int, int, int]], length: int, device_evicted: int
) -> None:
    index, keys = PrefixIndex(100_000), keys_of(1, length)
    for upto in holdings:
        column = index.open_column()
        for tier, count in zip(TIERS, upto, strict=True):
            index.add(column, keys[:count], depths_of(min(count, length)), tier)
    index.remove(0, keys[device_evicted:], Tier.DEVICE)
    holdings[0] = (min(holdings[0][0], device_evicted), *holdings[0][1:])
    expected = [
        tuple(BLOCK * min(depth, length) for depth in (device, max(device, host), max(device, host, disk)))
        for device, host, disk in holdings
    ]
    walk = index.walk(keys, BLOCK)
    assert tiers_of(walk.levels, len(holdings)) == expected
    deepest = max(held for _, _, held in expected)
    assert (walk.reached + 1, walk.depth) == (deepest // BLOCK, deepest)


@given(st.lists(st.tuples(*[st.integers(0, 40)] * 3), min_size=1, max_size=5))
def test_a_tier_goes_on_where_the_nearer_one_ends(spans: list[tuple[int, int, int]]) -> None:
    # As agents tell it: each boundary once, in the tier that serves it.
    index, keys = PrefixIndex(100_000), keys_of(9, 120)
    for lengths in spans:
        column, start = index.open_column(), 0
        for tier, length in zip(TIERS, lengths, strict=True):
            index.add(column, keys[start : start + length], depths_of(120)[start : start + length], tier)
            start += length
    expected = [tuple(BLOCK * sum(lengths[:upto]) for upto in (1, 2, 3)) for lengths in spans]
    assert tiers_of(index.walk(keys, BLOCK).levels, len(spans)) == expected


@given(st.lists(st.integers(0, 80), min_size=1, max_size=8))
def test_levels_grow_in_depth_and_shrink_in_holders(counts: list[int]) -> None:
    index, keys = PrefixIndex(100_000), keys_of(2, 80)
    for count in counts:
        index.add(index.open_column(), keys[:count], depths_of(count), Tier.DEVICE)
    levels = index.walk(keys, BLOCK).levels
    assert len(levels) == len({count for count in counts if count})
    for shallow, deep in pairwise(levels):
        assert shallow.tokens < deep.tokens
        assert deep.held & ~shallow.held == 0
        assert deep.device & ~deep.host == deep.host & ~deep.held == 0


def test_only_a_prefix_counts_not_any_common_block() -> None:
    # aibrix 917: [X][A] cached matched requests that start [B][A]. Hashes cover everything before, so [A] has another one.
    index = PrefixIndex(1000)
    x, x_a, b, b_a = keys_of(3, 4)
    index.add(index.open_column(), [x, x_a], [16, 32], Tier.DEVICE)
    assert index.walk([b, b_a], BLOCK).levels == []
    assert found(index.walk([x, b_a], BLOCK).levels, 1) == [(16, 16)]


def test_nothing_behind_a_hole_counts() -> None:
    index, keys = PrefixIndex(10_000), keys_of(4, 60)
    index.add(index.open_column(), keys, depths_of(60), Tier.DEVICE)
    index.remove(0, keys[20 : 20 + STRIDE], Tier.DEVICE)
    assert found(index.walk(keys, BLOCK).levels, 1) == [(20 * BLOCK, 20 * BLOCK)]


def test_boundaries_below_one_block_count_as_held() -> None:
    # Evicting the block that a role marker hangs on made everything behind it seem gone (residency.md 2).
    index, keys = PrefixIndex(1000), keys_of(5, 6)
    depths = [3, 7, 15, 16, 40, 64]
    a, b = index.open_column(), index.open_column()
    index.add(a, keys[3:], depths[3:], Tier.DEVICE)
    index.add(b, [*keys[:1], *keys[4:]], [3, 40, 64], Tier.HOST)
    assert found(index.walk(keys, BLOCK).levels, 2) == [(64, 64), (0, 0)]
    index.remove(a, keys[3:], Tier.DEVICE)
    assert found(index.walk(keys, BLOCK).levels, 2) == [(0, 0), (0, 64)]
    assert index.walk(keys[:1], BLOCK).levels == []


def test_a_cold_prompt_costs_a_few_lookups_not_all() -> None:
    class Counting(list[int]):
        read = 0

        def __iter__(self):  # type: ignore[no-untyped-def]
            for each in super().__iter__():
                self.read += 1
                yield each

    index, keys = PrefixIndex(1000), Counting(keys_of(6, 700))
    index.open_column()
    assert index.walk(keys, BLOCK).levels == []
    assert keys.read <= BLOCK + 1


def test_a_boundary_that_the_router_forgot_does_not_end_the_prefix() -> None:
    index, keys = PrefixIndex(SHARDS * 40), keys_of(7, 60)
    column = index.open_column()
    index.add(column, keys, depths_of(60), Tier.DEVICE)
    lost = keys[30]
    same_shard = [number << 8 | lost & 0xFF for number in range(1, 200)]
    index.add(column, same_shard, [10_000] * len(same_shard), Tier.DEVICE)
    for key in keys[20:40]:  # whoever else was evicted beside it
        if key != lost and not index.walk([key], BLOCK).levels:
            index.add(column, [key], [BLOCK * (1 + keys.index(key))], Tier.DEVICE)
    assert index.evicted > 0
    assert found(index.walk(keys, BLOCK).levels, 1) == [(60 * BLOCK, 60 * BLOCK)]


def test_depth_zero_and_enormous_depths_stay_in_their_field() -> None:
    index = PrefixIndex(1000)
    column = index.open_column()
    index.add(column, [1, 2], [0, 1 << 40], Tier.DEVICE)
    assert index.walk([1, 2], BLOCK).levels == [Level(MAX_DEPTH, 1, 1, 1)]


def test_a_dropped_replica_is_invisible_at_once_and_its_column_comes_back_clean() -> None:
    index, keys = PrefixIndex(100_000), keys_of(8, 3000)
    a, b = index.open_column(), index.open_column()
    for column in (a, b):
        index.add(column, keys, depths_of(3000), Tier.DEVICE)
    index.drop_column(a)
    assert found(index.walk(keys[:1], BLOCK).levels, 2) == [(0, 0), (16, 16)]
    assert index.sweep()
    assert index.open_column() == 2, "a column is not reused before its bits are gone"
    while index.sweep():
        pass
    assert index.count(a) == 0
    assert index.open_column() == a
    assert found(index.walk(keys[:1], BLOCK).levels, 2) == [(0, 0), (16, 16)]
    with pytest.raises(ValueError, match="not open"):
        index.drop_column(17)


def test_boundaries_of_a_dropped_replica_are_freed() -> None:
    index, keys = PrefixIndex(100_000), keys_of(9, 2000)
    index.add(index.open_column(), keys, depths_of(2000), Tier.DISK)
    index.drop_column(0)
    while index.sweep():
        pass
    assert len(index) == 0


def test_late_words_of_a_dropped_replica_change_nothing_visible() -> None:
    index = PrefixIndex(1000)
    column = index.open_column()
    index.drop_column(column)
    index.add(column, [5], [16], Tier.DEVICE)
    index.remove(column, [5, 6], Tier.DEVICE)
    assert index.walk([5], BLOCK).levels == []


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(TIERS), st.integers(0, 30), st.booleans()), max_size=60))
def test_counts_agree_with_what_is_held(steps: list[tuple[int, Tier, int, bool]]) -> None:
    index, model = PrefixIndex(10_000), [dict[int, set[Tier]]() for _ in range(3)]
    for _ in model:
        index.open_column()
    for column, tier, key, add in steps:
        tiers = model[column].setdefault(key, set())
        if add:
            index.add(column, [key], [16], tier)
            tiers.add(tier)
        else:
            index.remove(column, [key], tier)
            tiers.discard(tier)
    assert [index.count(column) for column in range(3)] == [sum(map(bool, each.values())) for each in model]
    assert len(index) == len({key for each in model for key, tiers in each.items() if tiers})


def test_ten_times_more_distinct_prefixes_than_fit_stay_within_the_bound() -> None:
    index, draw = PrefixIndex(20_000), random.Random(10)
    columns = [index.open_column() for _ in range(4)]
    for _ in range(400):
        hashes = [draw.getrandbits(64) for _ in range(500)]
        index.add(draw.choice(columns), hashes, depths_of(500), Tier.DEVICE)
        assert len(index) <= 20_000
    assert len(index) > 15_000
    assert index.evicted == 200_000 - len(index)
    assert sum(map(index.count, columns)) == len(index)
    assert index.approximate_bytes < 200 * 20_000


def test_deep_boundaries_on_disks_alone_are_forgotten_first() -> None:
    index = PrefixIndex(SHARDS * 32)
    a, b = index.open_column(), index.open_column()
    one_shard = [number << 8 for number in range(1, 34)]
    near, disk = one_shard[:16], one_shard[16:32]
    index.add(a, near, [100_000] * 16, Tier.HOST)
    index.add(a, disk, depths_of(16), Tier.DISK)
    index.add(b, disk[-1:], [256], Tier.DEVICE)
    index.add(a, one_shard[32:], [16], Tier.DEVICE)
    gone = [key for key in one_shard if not index.walk([key], BLOCK).levels]
    assert gone
    assert gone == disk[-1 - len(gone) : -1], "the deepest, but for the one that another replica has at hand"


def test_what_moved_down_to_disk_is_forgotten_first() -> None:
    index = PrefixIndex(SHARDS * 32)
    column = index.open_column()
    one_shard = [number << 8 for number in range(1, 34)]
    index.add(column, one_shard[:32], [64] * 32, Tier.DEVICE)
    index.add(column, one_shard[20:21], [64], Tier.DISK)
    index.remove(column, one_shard[20:21], Tier.DEVICE)
    index.add(column, one_shard[32:], [64], Tier.DEVICE)
    assert [key for key in one_shard if not index.walk([key], BLOCK).levels] == [one_shard[20]]


def test_heads_and_repeated_boundaries_outlive_old_tails() -> None:
    index = PrefixIndex(SHARDS * 64)
    column = index.open_column()
    heads, tails, repeated = ([number << 8 | kind << 40 for number in range(16)] for kind in (1, 2, 3))
    for keys, depth in ((heads, 64), (tails, 5000), (repeated, 5000)):
        index.add(column, keys, [depth] * 16, Tier.DEVICE)
    index.add(column, repeated, [5000] * 16, Tier.DEVICE)
    index.add(column, [number << 8 | 4 << 40 for number in range(32)], [3000] * 32, Tier.DEVICE)
    assert all(index.walk([key], BLOCK).levels for key in (*heads, *repeated))
    assert not all(index.walk([key], BLOCK).levels for key in tails)


def test_a_walk_over_forgotten_boundaries_ends() -> None:
    index, keys = PrefixIndex(SHARDS), keys_of(11, 3 * GIVE_UP)
    column = index.open_column()
    index.add(column, keys_of(12, 2000), depths_of(2000), Tier.DEVICE)
    assert index.evicted
    assert index.walk(keys, BLOCK).levels == []


def test_predictions_extend_what_is_known() -> None:
    index, predicted, keys = PrefixIndex(10_000), Predicted(10_000), keys_of(13, 50)
    a, b = index.open_column(), index.open_column()
    index.add(a, keys[:10], depths_of(10), Tier.DEVICE)
    index.add(b, keys[:20], depths_of(20), Tier.HOST)
    predicted.add(a, keys[10:40], lambda known: depths_of(40)[10 + known :], until=9.0)
    levels = index.walk(keys, BLOCK, predicted.marks).levels
    assert found(levels, 2) == [(640, 640), (0, 320)]
    assert found(index.walk(keys, BLOCK).levels, 2) == [(160, 160), (0, 320)]


def test_a_prediction_alone_is_a_hit() -> None:
    index, predicted, keys = PrefixIndex(10_000), Predicted(10_000), keys_of(14, 50)
    column = index.open_column()
    predicted.add(column, keys, lambda known: depths_of(50)[known:], until=9.0)
    assert index.walk(keys, BLOCK, predicted.marks).levels == [Level(800, 1, 1, 1)]
    index.drop_column(column)
    assert index.walk(keys, BLOCK, predicted.marks).levels == []


def test_the_depth_of_one_boundary_is_told_by_whoever_holds_it() -> None:
    index, keys = PrefixIndex(10_000), keys_of(15, 2)
    a, b = index.open_column(), index.open_column()
    index.add(a, keys[:1], [16], Tier.HOST)
    assert [index.depth(key, 1 << 3 * a) for key in keys] == [16, 0]
    assert index.depth(keys[0], 1 << 3 * b) == 0
    assert index.depth(keys[0], 1 << 3 * a | 1 << 3 * b) == 16


@pytest.mark.parametrize("columns", [1, 8, 64, 256])
def test_a_byte_budget_becomes_a_capacity(columns: int) -> None:
    assert 250_000 < capacity(64 << 20, columns) < 600_000
    assert capacity(0, columns) == SHARDS


def test_a_depth_that_an_agent_corrected_was_never_taken_over() -> None:
    """Agents publish a boundary anew when they know its depth better."""
    index, keys = PrefixIndex(100_000), keys_of(3, 2)
    column = index.open_column()
    index.add(column, keys, [16, 20], Tier.DEVICE)
    index.add(column, keys[1:], [48], Tier.DEVICE)
    assert found(index.walk(keys, BLOCK).levels, 1) == [(48, 48)]
    index.add(column, keys[1:], [32], Tier.DEVICE)
    assert found(index.walk(keys, BLOCK).levels, 1) == [(32, 32)]
    assert index.count(column) == 2
