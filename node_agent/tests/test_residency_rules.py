"""The rules learned on real vLLM (research/residency.md), one by one."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from prefixpool.chain import canonical, prefix_chain
from prefixpool.note import Arrival, End
from prefixpool.wire import Tier
from prefixpool_agent.residency import Limits, TokenTable
from prefixpool_agent.residency.boundaries import MOST_ON_BLOCK
from prefixpool_testing.residency_rig import CHAT, COMPLETIONS, DAY, SIZE, TEMPLATE, Rig

MODEL = Path(__file__).parent / "data" / "tiny_model"
SYSTEM = {"role": "system", "content": "You route requests to engines; the prefix of blocks stays where it is cached. " * 3}
Message = dict[str, str]


@pytest.fixture
def rig() -> Rig:
    return Rig(MODEL)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def body(*messages: Message, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages), **more}


def marks(rig: Rig, request: dict[str, Any]) -> dict[int, int]:
    """Mark -> published token depth on the device."""
    found = canonical(CHAT, request, template=TEMPLATE, day=DAY)
    assert found is not None
    chain = prefix_chain(found)
    rows = zip(chain.hashes, chain.marks, strict=True)
    return {mark: rig.picture[Tier.DEVICE, key] for key, mark in rows if mark >= 0 and (Tier.DEVICE, key) in rig.picture}


# 1
def test_all_marks_are_published_however_close_they_are(rig: Rig) -> None:
    request = body(SYSTEM, user("a"), {"role": "assistant", "content": "b"}, user("c"))
    rig.ask(CHAT, request)
    assert sorted(marks(rig, request)) == [0, 1, 2, 3, 4]


# 2
def test_a_boundary_is_published_only_with_its_whole_path(rig: Rig) -> None:
    request = body(SYSTEM, user("What is cached here, and where?"))
    rig.ask(CHAT, request)
    hashes = rig.engine.hashes(rig.render(CHAT, request))
    rig.residency.event({"type": "BlockRemoved", "block_hashes": [hashes[1]], "medium": "GPU"})
    rig.flush()
    assert rig.picture
    assert max(rig.picture.values()) < 2 * SIZE
    rig.assert_picture_is_snapshot()


def test_a_request_of_one_message_without_role_and_text_ended_the_agent(rig: Rig) -> None:
    rig.ask(CHAT, {"model": "m", "messages": [{"role": "", "content": []}]}, "an answer " * 20)
    assert rig.picture
    rig.assert_picture_is_snapshot()


def test_messages_that_the_template_leaves_out_cost_time_as_the_square_of_their_number(rig: Rig) -> None:
    """All their boundaries hang on the last block before them."""
    blocks, path = rig.engine.hashes(range(3 * SIZE)), []
    rig.residency.event(
        {"type": "BlockStored", "block_hashes": blocks, "parent_block_hash": None}
        | {"token_ids": list(range(3 * SIZE)), "block_size": SIZE, "medium": "GPU"}
    )
    boundaries, trie = rig.residency._boundaries, rig.residency._trie
    path = [block for hash_ in blocks if (block := trie.placed(hash_))]
    started = time.process_time()
    for key in range(1, 20_001):
        boundaries.attach(key, 2 * SIZE + 1, path)
    rig.flush()
    assert time.process_time() - started < 1.0
    assert 0 < len(boundaries) <= MOST_ON_BLOCK
    assert (Tier.DEVICE, 20_000) in rig.picture, "the newest stay"
    rig.assert_picture_is_snapshot()


def test_boundaries_below_one_block_live_with_the_first_block(rig: Rig) -> None:
    request = body(SYSTEM, user("x"))
    rig.ask(CHAT, request)
    assert marks(rig, request)[0] < SIZE
    first = rig.engine.hashes(rig.render(CHAT, request))[0]
    rig.residency.event({"type": "BlockRemoved", "block_hashes": [first], "medium": "GPU"})
    rig.flush()
    assert rig.picture == {}


# 3 is the gate's: it strips the client's own session id.


# 4
def test_the_end_places_the_generation_mark_and_the_reply(rig: Rig) -> None:
    messages = [SYSTEM, user("What is a prefix?")]
    reply = "A prefix is what comes first, and blocks hold it. " * 2
    run = rig.arrive(CHAT, body(*messages))
    prompt = len(run.tokens)
    rig.pump()
    rig.flush()
    assert 2 not in marks(rig, body(*messages)), "the prompt's length is not known before"
    rig.engine.finish(run, [*rig.bpe.encode(reply), 2])
    rig.pump()
    rig.residency.end(rig.answer(CHAT, run, prompt, reply, len(rig.bpe.encode(reply)) + 1))
    rig.flush()
    assert marks(rig, body(*messages))[2] == prompt
    following = body(*messages, {"role": "assistant", "content": reply}, user("And then?"))
    assert rig.predicted(CHAT, following) == rig.engine.match(rig.render(CHAT, following)) > prompt


@pytest.mark.parametrize("reply", [" leading blank may merge", "<think>dropped</think>"])
def test_a_reply_that_the_next_turn_may_print_otherwise_is_not_credited(rig: Rig, reply: str) -> None:
    messages = [SYSTEM, user("What is a prefix?")]
    shown = reply.removeprefix("<think>dropped</think>") or "an answer"
    run = rig.arrive(CHAT, body(*messages))
    prompt, output = len(run.tokens), [*rig.bpe.encode(reply * 9), 2]
    rig.engine.finish(run, output)
    rig.pump()
    rig.residency.end(rig.answer(CHAT, run, prompt, shown * 9, len(output)))
    rig.flush()
    assert max(rig.picture.values()) == prompt
    assert rig.residency.counts["reply_not_credited"] == 1


def test_a_completion_is_continued_only_where_a_word_begins(rig: Rig) -> None:
    prompt = "the engine holds a prefix of tokens and blocks"
    rig.ask(COMPLETIONS, {"model": "m", "prompt": prompt}, " and routers publish boundaries, agents follow events")
    following = {"model": "m", "prompt": prompt + " and routers publish boundaries, agents follow events; so?"}
    assert rig.engine.match(rig.render(COMPLETIONS, following)) - rig.predicted(COMPLETIONS, following) <= 2 * SIZE
    before = len(rig.picture)
    rig.ask(COMPLETIONS, {"model": "m", "prompt": prompt}, "s and other things that merge with what was there before")
    assert len(rig.picture) == before


def test_depths_published_while_a_prompt_is_still_computed_are_final(rig: Rig) -> None:
    """A boundary's depth is a fact about the text: what is not known yet is not published."""
    request = body({"role": "system", "content": SYSTEM["content"] * 12}, user("And what is a block? " * 40))
    run = rig.arrive(CHAT, request)
    events, rig.engine.events = rig.engine.events, []
    assert len(events) > 3, "computed in steps"
    seen: list[dict[tuple[Tier, int], int]] = []
    for event in events:
        rig.residency.event(event)
        rig.flush()
        seen.append(dict(rig.picture))
    rig.engine.finish(run, [2])
    rig.residency.end(rig.answer(CHAT, run, len(run.tokens), "", 1))
    rig.flush()
    assert len(seen[0]) < len(seen[-1]) < len(rig.picture)
    assert all(rig.picture[key] == depth for picture in seen for key, depth in picture.items())


def test_a_known_prefix_is_not_read_again(rig: Rig) -> None:
    """Else a long conversation costs the agent its whole length at every turn."""
    table = Reads(rig.table)
    rig.table = table
    rig.residency = rig.fresh()
    messages = [{"role": "system", "content": SYSTEM["content"] * 20}]
    for turn in range(4):
        rig.chat([{"role": "system", "content": f"{turn} has the same role header, another first block"}, user("x")])
        table.reads = 0
        messages = [*messages, user(f"And number {turn}?")]
        rig.chat(messages, "It is fine.")
        assert turn == 0 or table.reads < 200
        messages = [*messages, {"role": "assistant", "content": "It is fine."}]


class Reads:
    """Counts how many tokens are looked up."""

    def __init__(self, table: TokenTable) -> None:
        self.table = table
        self.reads = 0

    def __getitem__(self, token: int, /) -> bytes:
        self.reads += 1
        return self.table[token]


# 5
def test_a_reset_that_only_the_gate_tells_clears_the_device_at_once(rig: Rig) -> None:
    rig.chat([SYSTEM, user("x")])
    rig.residency.cleared(external=False)
    rig.flush()
    assert rig.picture == {}
    rig.assert_picture_is_snapshot()


def test_a_reset_leaves_the_host_tier_unless_it_is_external() -> None:
    rig = Rig(MODEL, host_blocks=500)
    rig.chat([SYSTEM, user("x")])
    rig.residency.cleared(external=False)
    rig.flush()
    assert {tier for tier, _ in rig.picture} == {Tier.HOST}
    rig.residency.cleared(external=True)
    rig.flush()
    assert rig.picture == {}


# 6
@pytest.mark.parametrize("notes_first", [True, False])
def test_notes_and_events_may_come_in_either_order(rig: Rig, notes_first: bool) -> None:
    messages, reply = [SYSTEM, user("What is a prefix?")], "What comes first."
    run = rig.engine.begin("r1", rig.render(CHAT, body(*messages)))
    prompt, output = len(run.tokens), [*rig.bpe.encode(reply), 2]
    rig.engine.finish(run, output)
    if not notes_first:
        rig.pump()
        rig.flush()
    rig.residency.arrival(Arrival("r1", 0.0, CHAT, json.dumps(body(*messages)).encode()), DAY)
    rig.residency.end(rig.answer(CHAT, run, prompt, reply, len(output)))
    rig.flush()
    rig.pump()
    rig.flush()
    assert rig.predicted(CHAT, body(*messages)) == prompt // SIZE * SIZE
    assert rig.residency.sessions == 0, "nothing is kept once all is placed"


def test_notes_that_are_sent_again_are_told_once(rig: Rig) -> None:
    finished = rig.chat([SYSTEM, user("x")], "yes")
    arrival, end = rig.notes
    assert isinstance(arrival, Arrival)
    assert isinstance(end, End)
    rig.residency.arrival(arrival, DAY)
    assert rig.residency.end(end) is None
    assert rig.residency.sessions == 0
    assert finished.output_tokens == len(rig.bpe.encode("yes")) + 1


def test_a_lost_arrival_leaves_an_end_that_says_little(rig: Rig) -> None:
    run = rig.engine.begin("r1", rig.render(CHAT, body(SYSTEM, user("x"))))
    rig.pump()
    finished = rig.residency.end(rig.answer(CHAT, run, len(run.tokens), "ok", 2))
    assert finished is not None
    assert (finished.path, finished.predicted_tokens, finished.comparable) == ("", None, False)
    assert finished.prompt_tokens == len(run.tokens)
    assert rig.residency.counts["end_before_arrival"] == 1
    rig.flush()
    assert rig.picture == {}


# 7
def test_blocks_of_a_lost_note_come_back_with_the_next_noted_request(rig: Rig) -> None:
    messages = [SYSTEM, user("What is a prefix?")]
    run = rig.engine.begin("lost", rig.render(CHAT, body(*messages)))
    rig.engine.finish(run, [2])
    rig.pump()
    rig.flush()
    assert rig.predicted(CHAT, body(*messages)) == 0
    finished = rig.chat([*messages, {"role": "assistant", "content": "It comes first."}, user("And then?")])
    assert (finished.predicted_tokens, (finished.cached_tokens or 0) > 0) == (0, True)
    assert rig.predicted(CHAT, body(SYSTEM, user("other"))) == rig.engine.match(
        rig.render(CHAT, body(SYSTEM, user("other")))
    )


def test_a_full_report_heals_what_was_unknown(rig: Rig) -> None:
    messages = [SYSTEM, user("What is a prefix, and who holds it?" * 3)]
    run = rig.engine.begin("lost", rig.render(CHAT, body(*messages)))
    rig.engine.finish(run, [2])
    rig.engine.events.clear()  # the agent was away, and the engine's buffer is too short
    first = rig.chat(messages, full=True)
    assert (first.cached_tokens or 0) - (first.predicted_tokens or 0) > SIZE, "a reason to ask for a full report"
    assert first.full
    again = rig.chat(messages)
    assert again.predicted_tokens == again.cached_tokens


# 8 is the router's: own dispatches count at once.


# 9
def test_a_request_that_stores_nothing_is_found_by_its_boundaries(rig: Rig) -> None:
    text = "the engine holds a prefix of tokens and blocks; routers publish boundaries, agents follow events. hello naïve"
    rig.ask(COMPLETIONS, {"model": "m", "prompt": text * 3}, "")
    for length in range(200, 260):
        prompt = (text * 3)[:length]
        first = rig.ask(COMPLETIONS, {"model": "m", "prompt": prompt}, "")
        again = rig.ask(COMPLETIONS, {"model": "m", "prompt": prompt}, "")
        assert (first.predicted_tokens or 0) <= (first.cached_tokens or 0)
        assert again.predicted_tokens == again.cached_tokens
    assert rig.residency.counts["stored_nothing"] > 10


# -- the closed loop --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "comparable"),
    [
        ({}, True),
        ({"n": 1}, True),
        ({"n": 2}, False),
        ({"prompt_logprobs": 0}, False),
        ({"skip_reading_prefix_cache": True}, False),
        ({"echo": True, "logprobs": 1}, False),
        ({"best_of": 3}, False),
        ({"prompt": ["a", "b"]}, False),
        ({"prompt": ["the engine"]}, True),
        ({"prompt": [5, 6, 7]}, True),
    ],
)
def test_requests_whose_count_means_something_else_are_not_compared(
    rig: Rig, more: dict[str, Any], comparable: bool
) -> None:
    request = {"model": "m", "prompt": "the engine", **more}
    rig.residency.arrival(Arrival("r", 0.0, COMPLETIONS, json.dumps(request).encode()), DAY)
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 8}}
    answer = json.dumps({"choices": [{"text": "x"}], "usage": usage}).encode()
    finished = rig.residency.end(End("r", 0.5, 1.0, 200, answer))
    assert finished is not None
    assert finished.comparable is comparable
    assert (finished.uncached, finished.first_s, finished.at_s, finished.status) == (1, 0.5, 1.0, 200)


@pytest.mark.parametrize("status", [0, 400, 503])
def test_failed_requests_are_not_compared_and_not_kept(rig: Rig, status: int) -> None:
    rig.residency.arrival(Arrival("r", 0.0, CHAT, json.dumps(body(SYSTEM)).encode()), DAY)
    finished = rig.residency.end(End("r", 0.0, 1.0, status, b"", aborted=True))
    assert finished is not None
    assert not finished.comparable
    rig.flush()
    assert rig.residency.sessions == 0


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff", b"[" * 5000, b'{"messages": 7}', b'{"messages": [{"role": 1}]}'])
def test_odd_bodies_are_counted_or_ignored(rig: Rig, raw: bytes) -> None:
    rig.residency.arrival(Arrival("r", 0.0, CHAT, raw), DAY)
    rig.residency.end(End("r", 0.0, 1.0, 400, b"{}"))
    rig.flush()
    assert rig.residency.sessions == 0


def test_salted_prefixes_are_apart(rig: Rig) -> None:
    request = body(SYSTEM, user("x"), cache_salt="tenant")
    rig.ask(CHAT, request)
    assert rig.predicted(CHAT, request) > 0
    assert rig.predicted(CHAT, body(SYSTEM, user("x"))) == 0


# -- bounds -----------------------------------------------------------------------------------------------------------


def test_sessions_are_bounded_by_number_and_bytes() -> None:
    rig = Rig(MODEL, limits=Limits(sessions=8, content_bytes=4000))
    for i in range(50):
        rig.residency.arrival(Arrival(f"r{i}", 0.0, CHAT, json.dumps(body(SYSTEM, user("x" * 500))).encode()), DAY)
    assert rig.residency.sessions <= 5
    assert rig.residency.counts["sessions_dropped"] == 50 - rig.residency.sessions
    for i in range(50, 80):
        rig.residency.event(
            {
                "type": "BlockStored",
                "block_hashes": [i],
                "parent_block_hash": None,
                "token_ids": [1] * SIZE,
                "block_size": SIZE,
            }
            | {"medium": "GPU", "session_id": f"r{i}"}
        )
    assert rig.residency.sessions == 8
    assert rig.residency.counts["arrival_never_came"] > 0


def test_ended_requests_wait_for_their_events_only_so_long() -> None:
    rig = Rig(MODEL, limits=Limits(late_sessions=4))
    for i in range(20):
        run = rig.arrive(CHAT, body(SYSTEM, user(f"{i} " * 20)))
        rig.engine.events.clear()  # lost
        rig.residency.end(rig.answer(CHAT, run, len(run.tokens), "", 1))
        rig.flush()
    assert rig.residency.sessions == 4
    assert rig.residency.counts["sessions_unmapped"] == 16


def test_boundaries_are_bounded_and_the_picture_stays_true() -> None:
    rig = Rig(MODEL, limits=Limits(boundaries=100, remembered=50))
    for i in range(40):
        rig.chat([{"role": "system", "content": f"{i} " + SYSTEM["content"]}, user("x")])
        rig.assert_picture_is_snapshot()
        for j in range(i):  # routers read a missing boundary as the end of the prefix
            request = body({"role": "system", "content": f"{j} " + SYSTEM["content"]}, user("x"))
            deepest = max(depth or 0 for depth in rig.depths(CHAT, request))
            assert rig.predicted(CHAT, request) == deepest // SIZE * SIZE
        assert rig.residency.boundaries <= 100
    assert rig.residency.counts["boundaries_dropped"] > 0


# -- the agent's own death --------------------------------------------------------------------------------------------


def test_a_saved_map_and_a_replay_make_a_new_agent_right_without_any_note(rig: Rig) -> None:
    chats = [[SYSTEM, user(f"What about number {i}? " * 5)] for i in range(5)]
    for messages in chats:
        rig.chat(messages, "It is fine.")
    picture = dict(rig.picture)
    saved = rig.residency.save()
    assert b"route" not in saved
    rig.residency = rig.fresh()
    rig.picture.clear()
    assert rig.residency.restore(saved) == len(picture)
    rig.flush()
    assert rig.picture == {}, "nothing is resident before the engine says so"
    rig.replay()
    assert rig.picture == picture


def test_facts_survive_a_gap_in_the_events(rig: Rig) -> None:
    rig.chat([SYSTEM, user("x")], "yes")
    picture = dict(rig.picture)
    rig.residency.reset()
    rig.flush()
    assert rig.picture == {}
    rig.replay()
    assert rig.picture == picture


@pytest.mark.parametrize("damage", ["cut", "garbage", "version", "block size"])
def test_a_saved_map_that_does_not_fit_is_refused(rig: Rig, damage: str) -> None:
    rig.chat([SYSTEM, user("x")])
    saved = rig.residency.save()
    if damage == "cut":
        saved = saved[:-9]
    elif damage == "garbage":
        saved = b"\x00\xff"
    elif damage == "version":
        saved = saved[:1] + b"\x63" + saved[2:]
    else:
        saved = saved[:2] + b"\x40" + saved[3:]
    new = rig.fresh()
    assert new.restore(saved) == 0
    assert new.counts == {"restore_refused": 1}
