"""The scheduler, step by step: what is computed, cached, announced and answered."""

from __future__ import annotations

import pytest

from prefixpool_agent.sim.sequence import Limits, Scope, Sequence
from prefixpool_agent.sim.tokenizer import IM_END
from prefixpool_testing.stepped_sim import SIZE, Engine, prompt, reply, sequence


@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 0), (5, 4), (32, 28), (33, 32), (35, 32)])
def test_a_repeated_prompt_is_cached_up_to_the_block_before_its_last_token(length: int, cached: int) -> None:
    engine = Engine()
    first, again = sequence(prompt(1, length)), sequence(prompt(1, length))
    engine.run(first)
    engine.run(again)
    assert (first.cached, again.cached) == (0, cached)


def test_a_reply_does_not_depend_on_caching_batching_or_chunking() -> None:
    alone = sequence(prompt(1, 50), 20)
    Engine().run(alone)
    crowded = [sequence(prompt(n, 50), 20) for n in (3, 1, 1, 2)]
    Engine(max_num_batched_tokens=16).run(*crowded)
    engine = Engine()
    engine.run(sequence(prompt(1, 50)))
    cached = sequence(prompt(1, 50), 20)
    engine.run(cached)
    assert cached.cached == 48
    assert reply(alone) == reply(crowded[1]) == reply(crowded[2]) == reply(cached)
    assert reply(alone) != reply(crowded[0])


def test_choices_and_seeds_give_other_replies() -> None:
    variants = ["", "1", " seed 7"]
    items = [Sequence(prompt(1, 9), Limits(12, ignore_eos=True), Scope(), block_tokens=SIZE, variant=v) for v in variants]
    Engine().run(*items)
    assert len({tuple(reply(item)) for item in items}) == 3


def test_a_block_reused_wrongly_changes_the_answer() -> None:
    engine = Engine()
    engine.run(sequence(prompt(1, 33)))
    right, wrong = sequence(prompt(1, 33), 12), sequence(prompt(1, 33), 12)
    engine.run(right)
    block = engine.scheduler.pool.cached(wrong.hashes.digests[7])
    assert block is not None
    block.state = b"another prefix's keys and values"
    engine.run(wrong)
    assert wrong.cached == 32
    assert reply(wrong) != reply(right)


def test_reused_blocks_that_are_wrong_in_the_middle_are_noticed_once_their_successors_are_computed_anew() -> None:
    engine = Engine()
    engine.run(sequence(prompt(1, 17)))
    right, wrong = sequence([*prompt(1, 17), *prompt(2, 20)], 12), sequence([*prompt(1, 17), *prompt(2, 20)], 12)
    Engine().run(right)
    block = engine.scheduler.pool.cached(wrong.hashes.digests[3])
    assert block is not None
    block.state = b"?"
    engine.run(wrong)
    assert reply(wrong) != reply(right)


def test_replies_become_cached_but_not_their_last_token() -> None:
    engine = Engine()
    first = sequence(prompt(1, 6), 7)
    engine.run(first)
    turn = sequence([*first.tokens, 5, 6, 7])
    engine.run(turn)
    assert turn.cached == 12  # 13 tokens, the last never computed: three blocks


def test_salts_and_adapters_have_caches_of_their_own() -> None:
    engine = Engine()
    engine.run(sequence(prompt(1, 33)))
    others = [Scope(salt="a"), Scope(adapter="l"), Scope(salt="a", adapter="l"), Scope(salt="b")]
    for scope in others:
        item = sequence(prompt(1, 33), scope=scope)
        engine.run(item)
        assert item.cached == 0
    again = sequence(prompt(1, 33), scope=Scope(salt="a"))
    engine.run(again)
    assert again.cached == 32


def test_a_request_that_must_compute_everything_hits_nothing() -> None:
    engine = Engine()
    engine.run(sequence(prompt(1, 33)))
    item = sequence(prompt(1, 33), scope=Scope(skip_cache=True))
    engine.run(item)
    assert item.cached == 0


def test_long_prompts_are_computed_in_chunks_and_each_chunk_is_one_batch_of_events() -> None:
    engine = Engine(max_num_batched_tokens=16)
    item = sequence(prompt(1, 42), scope=Scope(label="r1"))
    steps = engine.run(item)
    assert [work.new for step in steps for work in step.work] == [16, 16, 10]
    assert [[event["token_ids"] for event in batch] for batch in engine.batches] == [
        [prompt(1, 42)[:16]],
        [prompt(1, 42)[16:32]],
        [prompt(1, 42)[32:40]],
    ]


def test_decodes_run_beside_the_chunks_of_a_prefill() -> None:
    engine = Engine(max_num_batched_tokens=16)
    short, long = sequence(prompt(1, 5), 10), sequence(prompt(2, 60))
    engine.scheduler.add(short)
    engine.step()
    engine.scheduler.add(long)
    step = engine.step()
    assert [(work.sequence, work.new) for work in step.work] == [(short, 1), (long, 15)]
    assert step.shape().decodes == 1
    assert step.shape().context_tokens == 5
    assert step.shape().prefills == [(15, 0)]
    assert step.shape().requests == 1


def test_no_more_sequences_than_allowed_run_and_the_others_wait_in_order() -> None:
    engine = Engine(max_num_seqs=2)
    items = [sequence(prompt(n, 5), 3) for n in range(1, 6)]
    for item in items:
        engine.scheduler.add(item)
    step = engine.step()
    assert step.admitted == items[:2]
    assert list(engine.scheduler.waiting) == items[2:]
    engine.run()
    assert all(len(reply(item)) == 3 for item in items)


def test_a_prefix_is_shared_with_a_request_that_is_being_computed_in_the_same_step() -> None:
    first, second = sequence(prompt(1, 33), 5), sequence(prompt(1, 33), 5)
    Engine().run(first, second)
    assert (first.cached, second.cached) == (0, 32)
    assert reply(first) == reply(second)


def test_only_the_chunks_that_are_scheduled_are_shared() -> None:
    engine = Engine(max_num_batched_tokens=16)
    first, second = sequence(prompt(1, 33)), sequence(prompt(1, 33))
    engine.run(first, second)
    assert second.cached == 32
    engine = Engine(max_num_batched_tokens=24)
    first, second = sequence(prompt(1, 20)), sequence([*prompt(1, 20), *prompt(2, 20)])
    engine.run(first, second)
    assert second.cached == 20


def test_without_blocks_the_youngest_is_preempted_and_still_answers_the_same() -> None:
    engine = Engine(blocks=14)  # 13 blocks, 52 tokens
    items = [sequence(prompt(n, 10), 20) for n in (1, 2, 3)]
    steps = engine.run(*items)
    assert sum(step.preempted for step in steps) > 0
    assert items[0].preemptions == 0
    for item, number in zip(items, (1, 2, 3), strict=True):
        alone = sequence(prompt(number, 10), 20)
        Engine().run(alone)
        assert reply(item) == reply(alone)
    assert engine.scheduler.pool.free_blocks == 13


def test_a_prompt_waits_until_it_fits_as_a_whole() -> None:
    engine = Engine(blocks=14)
    running, large = sequence(prompt(1, 20), 8), sequence(prompt(2, 48))
    engine.scheduler.add(running)
    engine.step()
    engine.scheduler.add(large)
    engine.step()
    assert list(engine.scheduler.waiting) == [large]
    engine.run()
    assert len(reply(large)) == 1


def test_removed_sequences_give_their_blocks_back_and_leave_computed_ones_cached() -> None:
    engine = Engine()
    item, waiting = sequence(prompt(1, 33), 50), sequence(prompt(2, 5))
    engine.scheduler.add(item)
    engine.step()
    engine.scheduler.add(waiting)
    engine.scheduler.remove(item, "abort")
    engine.scheduler.remove(waiting, "abort")
    assert not engine.scheduler.busy
    assert engine.scheduler.pool.free_blocks == 64
    again = sequence(prompt(1, 33), 3)
    engine.run(again)
    alone = sequence(prompt(1, 33), 3)
    Engine().run(alone)
    assert again.cached == 32
    assert reply(again) == reply(alone)


def test_stored_events_have_vllms_keys() -> None:
    engine = Engine()
    item = sequence(prompt(1, 9), scope=Scope(label="r1", salt="s", adapter="l"))
    engine.run(item)
    (event,) = engine.events("BlockStored")
    hashes = event.pop("block_hashes")
    assert all(0 <= value < 1 << 64 for value in hashes)
    assert len(hashes) == 2
    assert event == {
        "type": "BlockStored",
        "parent_block_hash": None,
        "token_ids": prompt(1, 9)[:8],
        "block_size": SIZE,
        "lora_id": 1,
        "medium": "GPU",
        "lora_name": "l",
        "extra_keys": [["l", "s"], ["l"]],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "session_id": "r1",
    }


def test_events_form_a_chain_through_reused_blocks_and_reused_blocks_are_silent() -> None:
    engine = Engine()
    engine.run(sequence(prompt(1, 9)))
    engine.run(sequence([*prompt(1, 8), *prompt(2, 5)], 5))
    first, second, third = engine.events("BlockStored")
    assert second["parent_block_hash"] == first["block_hashes"][-1]
    assert second["token_ids"] == prompt(2, 4)
    assert third["parent_block_hash"] == second["block_hashes"][-1]
    assert "session_id" not in first


def test_a_full_report_announces_reused_blocks_again() -> None:
    engine = Engine()
    engine.run(sequence(prompt(1, 9)))
    engine.run(sequence(prompt(1, 9), scope=Scope(label="again", report_full=True)))
    first, second = engine.events("BlockStored")
    assert second["session_id"] == "again"
    assert (second["block_hashes"], second["parent_block_hash"]) == (first["block_hashes"], None)


def test_evictions_are_announced_before_what_takes_their_place() -> None:
    engine = Engine(blocks=6, max_model_len=20)
    engine.run(sequence(prompt(1, 16)))
    engine.run(sequence(prompt(2, 16)))
    kinds = [event["type"] for event in engine.batches[-1]]
    assert kinds == ["BlockRemoved"] * 3 + ["BlockStored"]
    (stored, _), removed = engine.events("BlockStored"), engine.events("BlockRemoved")
    assert [event["block_hashes"][0] for event in removed] == stored["block_hashes"][:0:-1]


def test_a_reset_is_announced_with_the_next_step_only() -> None:
    engine = Engine()
    engine.run(sequence(prompt(1, 9)))
    assert engine.scheduler.reset(external_tiers=False)
    engine.run(sequence(prompt(1, 9)))
    assert [event["type"] for event in engine.batches[-1]] == ["AllBlocksCleared", "BlockStored"]


def test_a_reset_is_refused_while_requests_run() -> None:
    engine = Engine()
    engine.scheduler.add(sequence(prompt(1, 9), 5))
    engine.step()
    assert engine.scheduler.reset(external_tiers=False) is False


def test_replies_end_at_their_limits() -> None:
    natural = sequence(prompt(1, 9), 1000, ignore_eos=False)
    longest = Engine(max_model_len=100)
    longest.run(cut := sequence(prompt(2, 90), 1000))
    Engine(blocks=400, max_model_len=1200).run(natural)
    assert (natural.finish, natural.tokens[-1]) == ("stop", IM_END)
    assert (cut.finish, len(cut.tokens)) == ("length", 100)


def test_min_tokens_and_ignore_eos_hold_the_end_back() -> None:
    natural = sequence(prompt(1, 9), 500, ignore_eos=False)
    more = sequence(prompt(1, 9), 500, ignore_eos=False, min_tokens=300)
    endless = sequence(prompt(1, 9), 500)
    Engine(blocks=600, max_model_len=1200).run(natural, more, endless)
    assert len(reply(natural)) < 300 <= len(reply(more)) < 500
    assert len(reply(endless)) == 500
    assert IM_END not in reply(endless)


def test_stop_tokens_end_a_reply() -> None:
    free = sequence(prompt(1, 9), 12)
    Engine().run(free)
    third = reply(free)[2]
    stopped = sequence(prompt(1, 9), 12, stop_tokens=frozenset({third}))
    Engine().run(stopped)
    assert (stopped.finish, stopped.stop_token) == ("stop", third)
    assert reply(stopped) == reply(free)[: reply(free).index(third) + 1]


def test_the_host_tier_brings_evicted_prefixes_back_with_the_same_answer() -> None:
    engine = Engine(blocks=12, host_blocks=40, max_model_len=44)
    first = sequence(prompt(1, 33), 5)
    engine.run(first)
    engine.run(sequence(prompt(2, 43)))
    again = sequence(prompt(1, 33), 5)
    steps = engine.run(again)
    assert (again.cached, again.cached_host) == (32, 32)
    assert sum(step.restored_tokens for step in steps) == 32
    assert reply(again) == reply(first)


def test_replies_are_kept_below_the_device_too() -> None:
    engine = Engine(blocks=12, host_blocks=40, max_model_len=44)
    engine.run(first := sequence(prompt(1, 9), 10))
    engine.run(sequence(prompt(2, 43)))
    engine.run(next_turn := sequence(first.tokens, 1))
    assert next_turn.cached_host == 16


def test_host_stores_describe_themselves_one_step_later() -> None:
    engine = Engine(host_blocks=8)
    engine.run(sequence(prompt(1, 9), 3, scope=Scope(label="r1")))
    stored = engine.events("BlockStored", "CPU")
    assert [event["type"] for event in engine.batches[0]] == ["BlockStored"]
    assert [event["medium"] for event in engine.batches[1]] == ["CPU", "CPU"]
    assert [event["token_ids"] for event in stored] == [prompt(1, 4), prompt(1, 8)[4:]]
    assert stored[1]["parent_block_hash"] == stored[0]["block_hashes"][0]
    assert "extra_keys" not in stored[0]


def test_the_host_tier_forgets_its_oldest_block_and_says_so() -> None:
    engine = Engine(host_blocks=2)
    engine.run(sequence(prompt(1, 9), 3))
    engine.run(sequence(prompt(2, 5), 3))
    (removed,) = engine.events("BlockRemoved", "CPU")
    assert removed["block_hashes"] == engine.events("BlockStored", "CPU")[0]["block_hashes"]


def test_a_device_reset_keeps_the_host_tier_unless_that_is_asked_for() -> None:
    engine = Engine(host_blocks=20)
    engine.run(sequence(prompt(1, 9)))
    engine.scheduler.reset(external_tiers=False)
    engine.run(kept := sequence(prompt(1, 9)))
    engine.scheduler.reset(external_tiers=True)
    engine.run(lost := sequence(prompt(1, 9)))
    assert (kept.cached_host, lost.cached) == (8, 0)
