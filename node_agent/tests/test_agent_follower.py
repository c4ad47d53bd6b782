"""The follower: what reaches routers, costs and healing from notes and events; time is handed in."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from prefixpool import note, wire
from prefixpool_agent.follower import HEAL_REQUESTS, Follower
from prefixpool_agent.kv_order import Batch
from prefixpool_agent.metrics import AgentMetrics
from prefixpool_agent.publisher import Publisher
from prefixpool_agent.residency import Limits, Residency
from prefixpool_agent.residency.sessions import Session
from prefixpool_agent.sim.template import ChatTemplate
from prefixpool_agent.sim.tokenizer import SimTokenizer, token_bytes

BLOCK = 16
PROMPT = "one two three four five six seven eight nine ten " * 20
WALL = 1_000_000.0  # wall clock at monotonic 0


class Table(dict[int, bytes]):
    def __missing__(self, token: int) -> bytes:
        return token_bytes(token)


class Rig:
    """A follower with a clock that the test moves, and a tiny engine."""

    def __init__(self) -> None:
        self.now = 100.0
        self.registry = CollectorRegistry()
        self.metrics = AgentMetrics(self.registry)
        self.publisher = Publisher(wire.Welcome(replica="p-0", epoch=1), lambda: self.follower.snapshot(), self.metrics)
        self.sent: list[note.ToGate] = []
        self.greeted: list[note.GateHello] = []
        self.follower = Follower(
            publisher=self.publisher,
            metrics=self.metrics,
            command=self._command,
            nudge=lambda: None,
            greeted=self.greeted.append,
            clock=lambda: self.now,
            wall=lambda: WALL + self.now,
        )
        self.tokenizer = SimTokenizer()
        self.residency = Residency(Table(), BLOCK, template=ChatTemplate().facts(), limits=Limits())
        self.follower.begin(self.residency, BLOCK, None)
        self.follower.caught_up()
        self.link = self.publisher.join("r")
        self.drain()

    def _command(self, command: note.ToGate) -> int:
        self.sent.append(command)
        return 1

    def drain(self) -> list[wire.FromAgent]:
        out = []
        while (frame := self.publisher.next_frame(self.link)) is not None:
            out.append(wire.decode_from_agent(frame))
        return out

    def published(self) -> set[int]:
        found = [m for m in self.drain() if isinstance(m, wire.Publish)]
        return {h for m in found for h in wire.unpack_hashes(m.hashes)}

    def tokens(self, prompt: str) -> list[int]:
        return self.tokenizer.encode(prompt)

    def arrive(self, id_: str, prompt: str = PROMPT) -> None:
        body = json.dumps({"model": "m", "prompt": prompt}).encode()
        self.follower.arrival(note.Arrival(id=id_, at_s=self.now, path="/v1/completions", body=body))

    def store(self, id_: str, prompt: str = PROMPT, base: int = 1) -> None:
        ids = self.tokens(prompt)
        count = len(ids) // BLOCK
        event = {
            "type": "BlockStored",
            "block_hashes": [base + i for i in range(count)],
            "parent_block_hash": None,
            "token_ids": ids[: count * BLOCK],
            "block_size": BLOCK,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
            "session_id": id_,
        }
        self.batch(event)

    def batch(self, event: dict[str, Any]) -> None:
        self.follower.kv_batch(Batch(WALL + self.now, [event], 0))

    def finish(self, id_: str, cached: int, prompt: str = PROMPT, output: int = 5) -> None:
        usage = {
            "prompt_tokens": len(self.tokens(prompt)),
            "completion_tokens": output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        body = json.dumps({"choices": [{"index": 0, "text": "x" * output}], "usage": usage}).encode()
        self.follower.end(note.End(id=id_, first_s=self.now, at_s=self.now, status=200, body=body))
        self.follower.flush()

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"prefixpool_agent_{name}", labels) or 0.0


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_served_request_is_published(rig: Rig) -> None:
    rig.arrive("a")
    rig.store("a")
    rig.finish("a", cached=0)
    assert rig.published()


def test_a_bug_met_in_one_requests_text_ended_the_agent(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = rig.residency._placer.place

    def broken(session: Session, *rest: Any) -> None:
        if session.id == "bad":
            raise ValueError("secret prompt")
        place(session, *rest)

    monkeypatch.setattr(rig.residency._placer, "place", broken)
    for id_, prompt, base in (("bad", "twenty to one " * 40, 500), ("good", PROMPT, 1)):
        rig.arrive(id_, prompt)
        rig.store(id_, prompt, base)
    rig.follower.flush()
    assert rig.published(), "of the other request"
    assert rig.residency.counts["placing_broke"] == 1
    assert rig.residency.sessions == 1
    assert "a request's boundaries could not be placed" in caplog.text
    assert "secret prompt" not in caplog.text
    rig.finish("bad", cached=0, prompt="twenty to one " * 40)
    rig.finish("good", cached=0)
    assert rig.residency.counts["placing_broke"] == 1, "it is not met again"


def test_a_bug_met_while_publishing_ended_the_agent(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Now routers get a new picture, and the engine tells anew what it reuses."""
    with monkeypatch.context() as broken:
        broken.setattr(rig.publisher, "publish", lambda *_: 1 // 0)
        rig.arrive("a")
        rig.store("a")
        rig.finish("a", cached=0)
    assert rig.count("flushes_broken_total") == 1
    assert rig.sent == [note.ReportFull(HEAL_REQUESTS)]
    begun = next(message for message in rig.drain() if isinstance(message, wire.SnapshotBegin))
    assert (begun.reason, begun.boundaries) == ("a bug of the agent", 0)
    rig.arrive("b")
    rig.store("b")
    rig.finish("b", cached=0)
    assert rig.published()


def test_second_request_is_predicted_and_compared(rig: Rig) -> None:
    rig.arrive("a")
    rig.store("a")
    rig.finish("a", cached=0)
    rig.arrive("b")
    rig.finish("b", cached=len(rig.tokens(PROMPT)) // BLOCK * BLOCK)
    assert rig.count("predictions_total", outcome="within") == 2
    assert rig.sent == []


def test_more_cached_than_predicted_asks_the_engine_to_tell(rig: Rig) -> None:
    rig.arrive("a")
    rig.finish("a", cached=10 * BLOCK)
    assert rig.sent == [note.ReportFull(HEAL_REQUESTS)]
    assert rig.count("predictions_total", outcome="under") == 1


def test_requests_of_an_earlier_agent_are_no_measure_of_this_one(rig: Rig) -> None:
    rig.arrive("old")
    rig.now += 1
    rig.follower.caught_up()
    rig.finish("old", cached=10 * BLOCK)
    assert rig.count("prediction_error_tokens_count") == 0
    assert rig.sent == []


def test_cache_reset_that_the_events_do_not_show_yet_empties_the_picture(rig: Rig) -> None:
    rig.arrive("a")
    rig.store("a")
    rig.finish("a", cached=0)
    rig.drain()
    rig.now += 1
    rig.follower.cache_reset(note.CacheReset(at_s=rig.now))
    rig.follower.flush()
    begin, end = rig.drain()
    assert (type(begin), type(end)) == (wire.SnapshotBegin, wire.SnapshotEnd)
    assert rig.residency.resident_blocks().total() == 0


def test_old_cache_reset_from_the_ring_does_not_empty_what_came_after_it(rig: Rig) -> None:
    reset_at = rig.now
    rig.now += 1
    rig.arrive("a")
    rig.store("a")
    rig.finish("a", cached=0)
    rig.follower.cache_reset(note.CacheReset(at_s=reset_at))
    assert rig.residency.resident_blocks().total() > 0


def test_lost_events_start_a_new_picture_and_ask_for_reports(rig: Rig) -> None:
    rig.arrive("a")
    rig.store("a")
    rig.finish("a", cached=0)
    rig.drain()
    rig.follower.kv_lost("3 batches")
    begin, end = rig.drain()
    assert (begin, end) == (wire.SnapshotBegin(epoch=1, reason="events lost"), wire.SnapshotEnd(epoch=1))
    assert rig.sent == [note.ReportFull(HEAL_REQUESTS)]


def test_engine_that_ended_leaves_an_empty_picture(rig: Rig) -> None:
    rig.arrive("a")
    rig.store("a")
    rig.finish("a", cached=0)
    rig.arrive("running")
    rig.drain()
    rig.follower.forget("engine ended")
    assert [type(m) for m in rig.drain()] == [wire.SnapshotBegin, wire.SnapshotEnd]
    assert rig.follower.backlog.tokens == 0


def test_backlog_falls_with_the_blocks_that_are_stored(rig: Rig) -> None:
    rig.arrive("a")
    before = rig.follower.backlog.tokens
    rig.store("a")
    assert 0 <= rig.follower.backlog.tokens < before
    rig.finish("a", cached=0)
    assert rig.follower.backlog.tokens == 0


def test_costs_of_answers_that_are_not_streamed_come_from_their_events(rig: Rig) -> None:
    for i in range(6):
        prompt = f"{i} " + PROMPT
        rig.arrive(str(i), prompt)
        rig.now += 0.4
        rig.store(str(i), prompt, base=1000 * i)
        rig.now += 0.2
        rig.finish(str(i), cached=0, prompt=prompt, output=5)
        rig.now += 1.0
    costs = rig.follower.costs
    assert costs.prefill_s_per_token * len(rig.tokens(PROMPT)) == pytest.approx(0.4, rel=0.05)
    assert costs.decode_step_s == pytest.approx(0.05, rel=0.02)


def test_requests_that_end_without_any_event_are_evidence_against_events(rig: Rig) -> None:
    rig.arrive("a")
    rig.finish("a", cached=0)
    assert rig.follower.uncached_since_s == rig.now
    rig.store("b")
    assert rig.follower.uncached_since_s == float("inf")


def test_without_a_tokenizer_notes_still_give_costs(rig: Rig) -> None:
    rig.follower.begin(None, BLOCK, None)
    for i in range(5):
        rig.arrive(str(i))
        rig.now += 0.5
        rig.finish(str(i), cached=0, output=1)
        rig.now += 1.0
    assert rig.follower.costs.prefill_s_per_token > 0
    assert list(rig.follower.snapshot()) == []


def test_lost_notes_of_a_gate_are_counted(rig: Rig) -> None:
    hello = note.GateHello(version=1, epoch=1, pid=1, dropped=7)
    rig.follower.hello(hello)
    assert rig.count("notes_lost_total") == 7
    assert rig.greeted == [hello]


def test_running_requests_are_bounded(rig: Rig) -> None:
    for i in range(5000):
        rig.arrive(str(i), "short")
    assert len(rig.follower._running) == 4096


def test_routers_are_told_anew_what_lies_on_a_disk_that_turns_out_to_be_shared(rig: Rig) -> None:
    rig.arrive("a")
    rig.store("a")
    rig.follower.flush()
    here = rig.published()
    blocks = range(1, 1 + len(rig.tokens(PROMPT)) // BLOCK)
    rig.follower.disk([], [(i, i - 1 if i > 1 else None) for i in blocks], [])
    rig.follower.flush()
    assert rig.published() == set(), "the device is nearer"
    rig.follower.mounts("store")
    rig.follower.flush()
    frames = [frame for frame in rig.drain() if isinstance(frame, wire.Publish)]
    assert {frame.tier for frame in frames} == {wire.Tier.DISK}
    assert {key for frame in frames for key in wire.unpack_hashes(frame.hashes)} == here


def test_another_engine_start_has_the_same_shared_disk(rig: Rig) -> None:
    rig.follower.mounts("store")
    again = Residency(Table(), BLOCK, template=ChatTemplate().facts(), limits=Limits())
    rig.follower.begin(again, BLOCK, None)
    rig.follower.caught_up()
    rig.arrive("a")
    rig.store("a")
    rig.follower.disk([], [(2, 1)], [])
    rig.drain()
    rig.follower.flush()
    tiers = {frame.tier for frame in rig.drain() if isinstance(frame, wire.Publish)}
    assert tiers == {wire.Tier.DEVICE}, "the block before it is not on disk"
