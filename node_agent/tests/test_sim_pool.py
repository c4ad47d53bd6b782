"""The block pool: vLLM's hashes, reference counts, eviction order, events."""

from __future__ import annotations

import pytest

from prefixpool_agent.sim.blockhash import NONE_HASH, BlockHashes, external, next_hash
from prefixpool_agent.sim.pool import Block, BlockPool

TOKENS = list(range(1000, 1096))
# Computed by an independent implementation that matched 1,508 of 1,508 events of vLLM 0.32 (research: vllm.md 2).
VLLM_HASHES = [
    "8cc14b60400932f99e0464fd97c701b721da9e3e0fdb94e9d0f10cad6e0ec692",
    "3b69946cbf3e2624320dcf826abb99a18eb0ff1af9504282483b51bb134f02d2",
    "51e313494d754c03531e0ab04c566f546c6296712dda821c210d1222b0fde2a8",
]


def digests(*, adapter: str = "", salt: str = "", tokens: list[int] = TOKENS) -> list[str]:
    hashes = BlockHashes(32, adapter=adapter, salt=salt)
    hashes.extend(tokens)
    return [digest.hex() for digest in hashes.digests]


def test_hashes_are_vllms() -> None:
    assert digests() == VLLM_HASHES
    assert external(bytes.fromhex(VLLM_HASHES[0])) == 15055828968291616402


def test_salted_and_adapter_hashes_are_vllms() -> None:
    assert [digest[:16] for digest in digests(salt="s")] == ["62a6f77db4ae07ac", "aa48b573058e25f4", "7725ee04f018a2d2"]
    assert [digest[:16] for digest in digests(adapter="a")] == ["e40546858639d9bd", "a54f428050adaa55", "fe601b99a2ab78d2"]


def test_only_full_blocks_are_hashed_and_growth_does_not_change_them() -> None:
    hashes = BlockHashes(32)
    for end in range(0, 97, 7):
        hashes.extend(TOKENS[:end])
    hashes.extend(TOKENS)
    assert [digest.hex() for digest in hashes.digests] == VLLM_HASHES
    assert digests(tokens=TOKENS[:63]) == VLLM_HASHES[:1]


def test_event_keys_are_untagged_and_the_salt_is_in_the_first_block_only() -> None:
    hashes = BlockHashes(32, adapter="a", salt="s")
    assert [hashes.event_keys(0), hashes.event_keys(1)] == [["a", "s"], ["a"]]
    assert BlockHashes(32).event_keys(0) is None


def filled(pool: BlockPool, first_token: int, blocks: int) -> tuple[list[Block], list[bytes]]:
    """Blocks of one made-up request, cached."""
    parent, out = NONE_HASH, []
    taken = pool.allocate(blocks)
    for i, block in enumerate(taken):
        parent = next_hash(parent, [first_token + i] * 4, ())
        pool.publish(block, parent)
        out.append(parent)
    return taken, out


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(4, 4)
    assert (pool.usable, pool.free_blocks) == (3, 3)
    assert 0 not in {block.id for block in pool.allocate(3)}
    with pytest.raises(IndexError):
        pool.allocate(1)


def test_the_tail_of_the_oldest_request_is_evicted_first() -> None:
    pool = BlockPool(7, 4)
    old, old_digests = filled(pool, 1, 3)
    new, new_digests = filled(pool, 50, 3)
    pool.release(old)
    pool.release(new)
    gone = []
    for _ in range(6):
        pool.allocate(1)
        gone += [event["block_hashes"][0] for event in pool.take_events()]
    assert gone == [external(digest) for digest in [*reversed(old_digests), *reversed(new_digests)]]


def test_using_a_prefix_again_keeps_it_from_eviction() -> None:
    pool = BlockPool(7, 4)
    first, first_digests = filled(pool, 1, 2)
    second, second_digests = filled(pool, 50, 2)
    pool.release(first)
    pool.release(second)
    hits = pool.match(first_digests, 9)
    pool.touch(hits)
    pool.release(hits)
    pool.allocate(4)  # two unused blocks and both of `second`
    assert pool.match(first_digests, 9) == hits
    assert pool.match(second_digests, 9) == []


def test_blocks_without_a_hash_are_reused_before_cached_ones() -> None:
    pool = BlockPool(4, 4)
    cached, cached_digests = filled(pool, 1, 1)
    loose = pool.allocate(2)
    pool.release(cached)
    pool.release(loose)
    pool.allocate(2)
    assert pool.match(cached_digests, 1) == cached


def test_a_block_in_use_is_not_evicted_by_the_end_of_another_user() -> None:
    pool = BlockPool(3, 4)
    blocks, wanted = filled(pool, 1, 2)
    pool.touch(blocks)
    pool.release(blocks)
    assert pool.free_blocks == 0
    pool.release(blocks)
    assert pool.free_blocks == 2
    assert pool.match(wanted, 9) == blocks


def test_a_match_ends_at_the_first_hole_and_at_the_limit() -> None:
    pool = BlockPool(8, 4)
    _, wanted = filled(pool, 1, 4)
    assert len(pool.match(wanted, 3)) == 3
    assert len(pool.match([wanted[0], b"?", wanted[1]], 9)) == 1


def test_copies_of_a_block_are_removed_one_event_each() -> None:
    pool = BlockPool(3, 4)
    one, same = filled(pool, 1, 1)
    other, _ = filled(pool, 1, 1)
    pool.release([*one, *other])
    pool.allocate(1)
    assert pool.cached(same[0]) is not None
    pool.allocate(1)
    assert pool.cached(same[0]) is None
    assert [event["type"] for event in pool.take_events()] == ["BlockRemoved"] * 2


def test_reset_waits_for_running_requests_and_then_forgets_everything() -> None:
    pool = BlockPool(4, 4)
    blocks, wanted = filled(pool, 1, 2)
    assert pool.reset() is False
    pool.release(blocks)
    assert pool.reset() is True
    assert pool.match(wanted, 9) == []
    pool.allocate(3)
    assert pool.take_events() == [{"type": "AllBlocksCleared"}]  # nothing is left to be removed one by one


def test_contents_depend_on_what_really_lies_before() -> None:
    first, other, second = Block(1), Block(2), Block(3)
    first.fill(None, [1, 2], 2)
    other.fill(None, [1, 3], 2)
    second.fill(first, [5], 2)
    second.fill(first, [6], 2)
    wrong = Block(4)
    wrong.fill(other, [5, 6], 2)
    assert second.state != wrong.state
    assert second.content == [5, 6]
