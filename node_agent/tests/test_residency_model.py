"""Random traffic through a small paged engine: predictions against what the engine really reuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefixpool.note import Arrival
from prefixpool_testing.residency_rig import CHAT, COMPLETIONS, DAY, SIZE, Rig

MODEL = Path(__file__).parent / "data" / "tiny_model"
TEXT = """the engine holds a prefix of tokens and blocks; routers publish boundaries, agents follow events. Grüße 你好
hello naïve café is residency?\n\n  indented code(x) = 42; {"json": true} unbelievable straße's 100% \u00e9 e\u0301 👩‍👩‍👧"""
WORDS = TEXT.split(" ")
SYSTEMS = [" ".join(WORDS * n) for n in (1, 2, 3)]
BLOCKS = 60
MOST_TOKENS = BLOCKS * SIZE - 3 * SIZE  # of one request
Messages = list[dict[str, str]]

texts = st.lists(st.sampled_from(WORDS), max_size=40).map(" ".join)
replies = st.lists(st.sampled_from(WORDS[:20]), min_size=1, max_size=30).map(" ".join)
# No shrinking: it takes minutes here, and the first failing story is short enough to read.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
SETTINGS = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    phases=PHASES,
    suppress_health_check=[HealthCheck.too_slow],
)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Traffic(RuleBasedStateMachine):
    """Every request is compared when it ends; the router's picture after every step."""

    host_blocks = 0

    @initialize()
    def start(self) -> None:
        self.rig = Rig(MODEL, BLOCKS, self.host_blocks)
        self.chats: list[Messages] = []
        self.requests: list[tuple[str, dict[str, Any]]] = []

    def ask(self, path: str, body: dict[str, Any], reply: str, **options: Any) -> None:
        if len(self.rig.render(path, body)) + len(self.rig.bpe.encode(reply)) > MOST_TOKENS:
            return
        finished = self.rig.ask(path, body, reply, **options)
        self.requests.append((path, body))
        assert finished.comparable
        assert finished.predicted_tokens is not None
        assert finished.cached_tokens is not None
        assert finished.predicted_tokens <= finished.cached_tokens + SIZE

    def say(self, messages: Messages, reply: str, **options: Any) -> None:
        body = {"model": "m", "messages": messages}
        self.ask(CHAT, body, reply, **options)
        self.chats.append([*messages, {"role": "assistant", "content": reply}])

    @rule(system=st.sampled_from(SYSTEMS), text=texts, reply=replies, events_first=st.booleans(), full=st.booleans())
    def new_chat(self, system: str, text: str, reply: str, events_first: bool, full: bool) -> None:
        self.say([{"role": "system", "content": system}, user(text)], reply, events_first=events_first, full=full)

    @precondition(lambda self: self.chats)
    @rule(data=st.data(), text=texts, reply=replies, events_first=st.booleans(), full=st.booleans())
    def continue_chat(self, data: st.DataObject, text: str, reply: str, events_first: bool, full: bool) -> None:
        chat = data.draw(st.sampled_from(self.chats))
        self.say([*chat, user(text)], reply, events_first=events_first, full=full)

    @precondition(lambda self: self.chats)
    @rule(data=st.data(), text=texts)
    def diverge_inside_a_message(self, data: st.DataObject, text: str) -> None:
        messages = data.draw(st.sampled_from(self.chats))
        at = data.draw(st.integers(0, len(messages) - 1))
        old = messages[at]["content"]
        cut = data.draw(st.integers(0, len(old)))
        self.say([*messages[:at], {**messages[at], "content": old[:cut] + text}], "fine.")

    @rule(system=st.sampled_from(SYSTEMS[:2]), text=texts, reply=replies, events_late=st.booleans())
    def same_request_twice_at_once(self, system: str, text: str, reply: str, events_late: bool) -> None:
        """Both compute the same blocks of the reply: two copies, removed one by one."""
        messages = [{"role": "system", "content": system}, user(text)]
        body = {"model": "m", "messages": messages}
        if len(self.rig.render(CHAT, body)) + len(self.rig.bpe.encode(reply)) > MOST_TOKENS // 2:
            return
        self.rig.ask_together(CHAT, [body, body], reply, events_late=events_late)
        self.requests.append((CHAT, body))
        self.chats.append([*messages, {"role": "assistant", "content": reply}])

    @rule(system=st.sampled_from(SYSTEMS), text=texts, reply=replies, salt=st.sampled_from(["", "tenant"]))
    def complete(self, system: str, text: str, reply: str, salt: str) -> None:
        body: dict[str, Any] = {"model": "m", "prompt": system + text} | ({"cache_salt": salt} if salt else {})
        self.ask(COMPLETIONS, body, reply)

    @rule(n=st.integers(1, 60), reply=replies)
    def complete_tokens(self, n: int, reply: str) -> None:
        self.ask(COMPLETIONS, {"model": "m", "prompt": [50 + i % 7 for i in range(n)]}, reply)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        path, body = data.draw(st.sampled_from(self.requests))
        self.ask(path, body, "again.")

    @rule(kind=st.sampled_from(["cache reset", "events lost", "agent restarts", "agent restarts, notes lost"]))
    def trouble(self, kind: str) -> None:
        if kind == "cache reset":
            self.cache_reset()
        elif kind == "events lost":
            self.events_lost()
        else:
            self.agent_restarts(notes="lost" not in kind)

    def cache_reset(self) -> None:
        self.rig.engine.reset()
        self.rig.residency.cleared(external=False)
        self.rig.flush()
        assert self.host_blocks or not self.rig.picture

    def events_lost(self) -> None:
        self.rig.residency.reset()
        self.rig.assert_nothing_in_snapshot()
        self.rig.flush()
        assert not self.rig.picture
        self.rig.replay()

    def agent_restarts(self, notes: bool) -> None:
        """Saved map and event replay; the gate's ring of notes, or not."""
        saved = self.rig.residency.save()
        self.rig.residency = self.rig.fresh()
        self.rig.picture.clear()
        self.rig.residency.restore(saved)
        self.rig.replay()
        for note in self.rig.notes if notes else ():
            if isinstance(note, Arrival):
                self.rig.residency.arrival(note, DAY)
            else:
                self.rig.residency.end(note)
        self.rig.flush()

    @invariant()
    def router_sees_the_snapshot_and_never_too_much(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.assert_picture_is_snapshot()
        for path, body in self.requests[-8:]:
            tokens = self.rig.render(path, body)
            cap = (len(tokens) - 1) // SIZE * SIZE
            actual = self.rig.engine.match(tokens, body.get("cache_salt", ""))
            assert min(self.rig.predicted(path, body), cap) <= actual + SIZE


class TrafficWithHostTier(Traffic):
    host_blocks = 50


TestTraffic = Traffic.TestCase
TestTraffic.settings = SETTINGS
TestTrafficWithHostTier = TrafficWithHostTier.TestCase
TestTrafficWithHostTier.settings = SETTINGS


@given(system=st.sampled_from(SYSTEMS), turns=st.lists(st.tuples(texts, replies), min_size=1, max_size=4), other=texts)
@settings(max_examples=60, deadline=None)
def test_where_marks_align_a_prediction_misses_by_one_block_at_most(
    system: str, turns: list[tuple[str, str]], other: str
) -> None:
    rig = Rig(MODEL)
    messages: Messages = [{"role": "system", "content": system}]
    for text, reply in turns:
        messages = [*messages, user(text)]
        finished = rig.chat(messages, reply)
        assert abs((finished.predicted_tokens or 0) - (finished.cached_tokens or 0)) <= SIZE
        prompt = {"model": "m", "messages": messages}
        assert rig.predicted(CHAT, prompt) // SIZE == len(rig.render(CHAT, prompt)) // SIZE, "as routers see it"
        again = rig.chat(messages, reply)
        assert again.predicted_tokens == again.cached_tokens, "an exact repeat"
        messages = [*messages, {"role": "assistant", "content": reply}]
    shared = rig.chat([messages[0], user("#" + other)])
    assert abs((shared.predicted_tokens or 0) - (shared.cached_tokens or 0)) <= SIZE
