"""The block trie: what the engine's events mean, odd ones included."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from prefixpool.wire import Template, Tier
from prefixpool_agent.residency import Limits, Residency
from prefixpool_agent.residency.block import Block
from prefixpool_agent.residency.blocks import BlockTrie
from prefixpool_agent.residency.kv_event import Removed, Stored, block_hash, parse_event

SIZE = 4


class Nobody:
    def changing(self, block: Block) -> None: ...
    def placed(self, block: Block) -> None: ...
    def dropped(self, block: Block) -> None: ...


class Trie(BlockTrie):
    def __init__(self, limit: int = 1000) -> None:
        self.counts: Counter[str] = Counter()
        super().__init__(SIZE, limit, Nobody(), self.counts)

    def store(
        self, hashes: list[int], parent: int | None = None, medium: str = "GPU", **more: Any
    ) -> tuple[Block | None, list[int]]:
        event = parse_event(stored(hashes, parent, medium, **more))
        assert isinstance(event, Stored)
        return self.stored(event)

    def levels(self) -> dict[int, Tier]:
        return {hash_: block.level for hash_, block in self._blocks.items()}


def stored(hashes: list[Any], parent: Any = None, medium: str | None = "GPU", **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": list(range(SIZE * len(hashes))),
        "block_size": SIZE,
        "medium": medium,
    } | more


def removed(hashes: list[Any], medium: str = "GPU", **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium} | more


D, H, S, A = Tier.DEVICE, Tier.HOST, Tier.DISK, Tier.ABSENT


def test_level_is_absent_behind_a_hole_and_back_when_it_is_filled() -> None:
    trie = Trie()
    trie.store([1, 2, 3])
    trie.removed([2], D)
    assert trie.levels() == {1: D, 2: A, 3: A}
    trie.store([2], 1)
    assert trie.levels() == {1: D, 2: D, 3: D}


def test_lower_tiers_serve_from_the_first_device_miss_on_and_never_the_other_way() -> None:
    trie = Trie()
    trie.store([1, 2, 3, 4])
    trie.store([2, 3], 1, "CPU")
    trie.store([4], 3, "STORAGE")
    assert trie.levels() == {1: D, 2: D, 3: D, 4: D}
    trie.removed([2], D)
    assert trie.levels() == {1: D, 2: H, 3: H, 4: S}, "4 is on the device, but nobody gets there"
    trie.removed([3], H)
    assert trie.levels()[3] is A


def test_copies_on_the_device_are_counted_below_they_are_sets() -> None:
    trie = Trie()
    _, again = trie.store([1])
    assert again == []
    _, again = trie.store([1])
    assert [block.hash for block in again] == [1]
    trie.add_copies(again)
    trie.removed([1], D)
    assert trie.levels() == {1: D}
    trie.removed([1], D)
    assert len(trie) == 0
    trie.store([1], None, "CPU")
    trie.store([1], None, "CPU")
    trie.removed([1], H)
    assert len(trie) == 0


@pytest.mark.parametrize("real", [True, False])
@pytest.mark.parametrize("removals", [0, 1, 2])
def test_a_suspected_copy_that_was_removed_meanwhile_is_not_added(real: bool, removals: int) -> None:
    """After a restart, events come first: removed twice, then the note says that there had been two copies."""
    trie = Trie()
    trie.store([1])
    trie.store([1], None, "CPU")  # so that the block is not forgotten
    _, again = trie.store([1])
    trie.suspect(again)
    trie.removed([1] * removals, D)
    trie.settle(again, real)
    assert trie.levels()[1] is (D if removals + (not real) < 2 else H)


@pytest.mark.parametrize("first", [True, False])
def test_a_copy_that_was_removed_does_not_come_back_when_another_session_suspected_one_too(first: bool) -> None:
    """After a restart: two had computed a block, a third re-announced it, both copies were removed, then come the notes."""
    trie = Trie()
    trie.store([1])
    trie.store([1], None, "CPU")  # so that the block is not forgotten
    computed, reused = trie.store([1])[1], trie.store([1])[1]
    trie.suspect(computed)
    trie.suspect(reused)
    trie.removed([1, 1], D)
    for again, real in sorted([(computed, True), (reused, False)], key=lambda pair: pair[1] is not first):
        trie.settle(again, real)
    assert trie.levels() == {1: H}


def test_a_copy_of_a_block_that_was_forgotten_is_not_added_when_the_block_is_back() -> None:
    trie = Trie()
    trie.store([1])
    _, before = trie.store([1])
    trie.suspect(before)
    trie.removed([1, 1], D)
    trie.store([1])
    _, after = trie.store([1])
    trie.suspect(after)
    trie.settle(before, real=True)
    trie.settle(after, real=False)
    trie.removed([1], D)
    assert len(trie) == 0


def test_parents_may_come_after_their_children() -> None:
    trie = Trie()
    for i in reversed(range(1, 200)):
        trie.store([i], i - 1 or None, "CPU")
    assert set(trie.levels().values()) == {H}
    deepest, _ = trie.store([199], 198, "CPU")
    assert deepest is not None
    assert [(block.hash, block.blocks) for block in deepest.path()] == [(i, i) for i in range(1, 200)]


def test_placeholder_events_name_hashes_only_and_corrupt_nothing() -> None:
    """LMCache#3532, vllm#43468: no tokens, block size 0, no parent. They say nothing about the place in the tree."""
    trie = Trie()
    trie.store([1, 2])
    trie.store([2, 77], None, "CPU", token_ids=[], block_size=0)
    assert trie.levels() == {1: D, 2: D, 77: A}, "a block of unknown text is not at the root"
    trie.removed([2], D)
    assert trie.levels()[2] is H, "a known hash is known on the host, too"
    trie.store([77], 2)
    assert trie.levels()[77] is H, "once its place is known, so is its level; the device copy serves nobody"


def test_unknown_parent_is_a_hole_until_it_is_announced() -> None:
    trie = Trie()
    trie.store([3], 2)
    assert trie.levels() == {2: A, 3: A}
    trie.store([1, 2])
    assert trie.levels() == {1: D, 2: D, 3: D}


def test_clearing_leaves_lower_tiers_unless_they_were_cleared_too() -> None:
    trie = Trie()
    trie.store([1, 2])
    trie.store([1], None, "CPU")
    trie.cleared(external=False)
    assert trie.levels() == {1: H}
    trie.cleared(external=True)
    assert len(trie) == 0


def test_host_memory_that_was_cleared_behind_blocks_on_disk_still_counted() -> None:
    """The levels before it had not changed, so it was not looked at."""
    trie = Trie()
    trie.store([1, 2, 3], None, "CPU")
    trie.store([1], None, "STORAGE")
    trie.store([3], 2, "STORAGE")
    trie.removed([1], H)
    assert trie.levels() == {1: S, 2: S, 3: S}
    trie.cleared(external=True)
    assert trie.levels() == {1: S, 2: A, 3: A}


def test_removals_of_unknown_blocks_are_counted() -> None:
    trie = Trie()
    trie.store([1])
    trie.removed([1, 9], H)
    assert trie.counts["removed_unknown"] == 2
    assert trie.levels() == {1: D}


def test_blocks_are_forgotten_when_they_are_nowhere_and_lead_nowhere() -> None:
    trie = Trie()
    trie.store([1, 2, 3])
    trie.removed([1, 2], D)
    assert len(trie) == 3, "3 may become reachable again"
    trie.removed([3], D)
    assert len(trie) == 0


def test_bounded_absent_blocks_go_first_then_new_ones_are_refused() -> None:
    trie = Trie(limit=32)
    trie.store(list(range(100, 110)), 99)  # unreachable
    trie.store(list(range(1, 22)))
    assert len(trie) == 32
    trie.store([50], 21)
    assert trie.counts["blocks_dropped"] == 11
    assert len(trie) == 22
    for i in range(60, 200):
        trie.store([i], None)
    assert len(trie) == 32
    assert trie.counts["blocks_refused"] > 0
    trie.removed([60], D)
    trie.store([1], None)
    assert trie.levels()[1] is D


def test_where_the_disk_held_more_than_may_be_known_nothing_new_on_the_device_was_known() -> None:
    trie = Trie(limit=32)
    for i in range(1, 41):
        trie.on_disk(i, i - 1 or None)
    assert trie.levels() == dict.fromkeys(range(1, 33), S), "the first of its kind stay"
    trie.store([100, 101])
    assert trie.levels() == dict.fromkeys(range(1, 31), S) | {100: D, 101: D}
    for i in range(200, 240):
        trie.store([i])
    assert set(trie.levels().values()) == {D}
    assert len(trie) == 32


def test_host_memory_yields_to_the_device_from_its_ends_and_to_no_disk() -> None:
    trie = Trie(limit=32)
    trie.store(list(range(1, 33)), medium="CPU")
    trie.on_disk(50, None)
    assert trie.levels() == dict.fromkeys(range(1, 33), H)
    trie.store([100])
    assert trie.levels() == dict.fromkeys(range(1, 31), H) | {100: D}
    trie.removed([100], D)
    trie.removed([30], H)
    assert trie.levels() == dict.fromkeys(range(1, 30), H), "links are whole"


def test_an_odd_number_of_tokens_is_ignored() -> None:
    trie = Trie()
    assert trie.store([1, 2], token_ids=[1, 2, 3], block_size=16) == (None, [])
    assert trie.counts["odd_block_size"] == 1


@pytest.mark.parametrize("raw", [0x1122334455667788, 0xFFAA1122334455667788, bytes.fromhex("00" * 24 + "1122334455667788")])
def test_hashes_are_the_low_64_bits_big_endian(raw: int | bytes) -> None:
    assert block_hash(raw) == 0x1122334455667788


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ({"type": "Heartbeat"}, "unknown_event"),
        ({}, "unknown_event"),
        (stored([1], medium="PEER"), "unknown_medium"),
        (stored([1], kv_cache_spec_kind="sliding_window"), "other_kv_group"),
        (stored([1], kv_cache_spec_kind="mamba"), "other_kv_group"),
        ({"type": "BlockStored", "medium": "GPU"}, "malformed_event"),
        (stored([None]), "malformed_event"),
        (stored([1], token_ids=[-1], block_size=1), "malformed_event"),
        (stored([1], token_ids="abc"), "malformed_event"),
    ],
)
def test_events_that_say_nothing_here_are_counted_by_reason(event: dict[str, Any], reason: str) -> None:
    residency = Residency({}, SIZE, template=Template(), limits=Limits())  # type: ignore[arg-type]
    residency.event(event)
    assert residency.counts == {reason: 1}
    assert residency.blocks == 0


def test_medium_none_is_the_device() -> None:
    event = parse_event(removed([1]) | {"medium": None})
    assert event == Removed([1], D, None)


def test_other_kv_groups_of_a_hybrid_model_change_nothing() -> None:
    """A sliding window group removes blocks of the same hash long before the full-attention group does."""
    residency = Residency({}, SIZE, template=Template(), limits=Limits())  # type: ignore[arg-type]
    residency.event(stored([1], group_idx=1, kv_cache_spec_kind="sliding_window"))
    residency.event(stored([1, 2], group_idx=0, kv_cache_spec_kind="full_attention"))
    residency.event(stored([1, 2], group_idx=2, kv_cache_spec_kind="full_attention"))
    residency.event(removed([1, 2], group_idx=1))
    residency.event(removed([2], group_idx=2))
    assert residency.resident_blocks().total() == 2
    residency.event(removed([2], group_idx=0))
    assert residency.resident_blocks().total() == 1
