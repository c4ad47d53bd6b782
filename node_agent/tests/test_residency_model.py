"""Random traffic through a small paged engine: predictions against what the engine really reuses."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefixpool.chain import canonical, prefix_chain
from prefixpool.note import Arrival, End
from prefixpool.wire import Template, Tier
from prefixpool_agent.residency import Finished, Limits, Residency, load_table
from prefixpool_testing.paged_engine import PagedEngine, Running
from prefixpool_testing.tiny_bpe import TinyBpe

DATA = Path(__file__).parent / "data"
DAY = "2026-01-01"
TEMPLATE = Template(digest="chatml", renders_tools=False)
BPE = TinyBpe(DATA / "tiny_model" / "tokenizer.json")
SIZE = 8
LIMITS = Limits()

WORDS = [
    "the",
    "engine",
    "holds",
    "a",
    "prefix",
    "of",
    "tokens",
    "and",
    "blocks;",
    "routers",
    "publish",
    "boundaries,",
    "agents",
    "follow",
    "events.",
    "Grüße",
    "你好",
    "hello",
    "naïve",
    "café\nwhat",
    "is",
    "residency?\n\n",
    "",
    "indented",
    "code(x)",
    "=",
    "42;",
    "{json:",
    "true}",
    "unbelievable",
    "straße",
]


def table() -> Any:
    folder = DATA / "tiny_model"
    return load_table(folder)


def chatml(messages: list[dict[str, str]]) -> str:
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages) + "<|im_start|>assistant\n"


class Rig:
    """Engine, residency, and a router's picture that is fed by changes only."""

    def __init__(self, blocks: int, host_blocks: int = 0, limits: Limits = LIMITS) -> None:
        self.engine = PagedEngine(blocks, SIZE, host_blocks)
        self.residency = Residency(table(), SIZE, template=TEMPLATE, limits=limits)
        self.picture: dict[tuple[Tier, int], int] = {}
        self.log: list[dict[str, Any]] = []
        self.notes: list[Arrival | End] = []
        self.count = 0

    def render(self, path: str, body: dict[str, Any]) -> list[int]:
        if path == "/v1/completions":
            prompt = body["prompt"]
            return prompt if isinstance(prompt, list) else BPE.encode(prompt)
        return BPE.encode(chatml(body["messages"]))

    def pump(self, residency: Residency | None = None) -> None:
        """Hand the engine's events over."""
        events, self.engine.events = self.engine.events, []
        self.log += events
        for event in events:
            (residency or self.residency).event(event)

    def flush(self) -> None:
        changes = self.residency.flush()
        for tier, rows in changes.publish.items():
            for hash_, depth in rows:
                self.picture[tier, hash_] = depth
        for tier, hashes in changes.retract.items():
            for hash_ in hashes:
                del self.picture[tier, hash_]

    def arrive(self, path: str, body: dict[str, Any], full: bool = False) -> Running:
        self.count += 1
        note = Arrival(f"r{self.count}", 1.0, path, json.dumps(body).encode(), full)
        self.notes.append(note)
        self.residency.arrival(note, DAY)
        return self.engine.begin(note.id, self.render(path, body), salt=body.get("cache_salt", ""), full=full)

    def answer(self, path: str, run: Running, prompt: int, reply: str, output: int) -> End:
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "prompt_tokens_details": {"cached_tokens": run.cached},
        }
        choice = {"text": reply} if path == "/v1/completions" else {"message": {"content": reply}}
        return End(run.id, 1.5, 2.0, 200, json.dumps({"choices": [choice], "usage": usage}).encode())

    def ask(
        self, path: str, body: dict[str, Any], reply: str = "", *, events_first: bool = True, full: bool = False
    ) -> Finished:
        """One request from its arrival to its end, at concurrency 1."""
        run = self.arrive(path, body, full)
        prompt = len(run.tokens)
        output = [*BPE.encode(reply), 2]
        if events_first:
            self.pump()
            self.flush()
        self.engine.finish(run, output)
        note = self.answer(path, run, prompt, reply, len(output))
        if events_first:
            self.pump()
        self.notes.append(note)
        finished = self.residency.end(note)
        self.pump()
        self.flush()
        assert finished is not None
        return finished

    def chat(self, messages: list[dict[str, str]], reply: str = "", **options: Any) -> Finished:
        return self.ask("/v1/chat/completions", {"model": "m", "messages": messages}, reply, **options)

    def predicted(self, path: str, body: dict[str, Any]) -> int:
        """As a router would see it from the changes alone."""
        request = canonical(path, body, template=TEMPLATE, salt=body.get("cache_salt", ""), day=DAY)
        assert request is not None
        depths = [
            self.picture[tier, h]
            for h in prefix_chain(request).hashes
            for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK)
            if (tier, h) in self.picture
        ]
        return max(depths, default=0) // SIZE * SIZE

    def assert_picture_is_snapshot(self) -> None:
        shot = {
            (tier, hash_): depth
            for tier, hashes, depths in self.residency.snapshot()
            for hash_, depth in zip(hashes, depths, strict=True)
        }
        assert shot == self.picture


@dataclass
class Chat:
    messages: list[dict[str, str]] = field(default_factory=list)


texts = st.lists(st.sampled_from(WORDS), min_size=0, max_size=40).map(" ".join)
replies = st.lists(st.sampled_from(WORDS[:20]), min_size=1, max_size=30).map(" ".join)
SYSTEMS = [" ".join(WORDS * n) for n in (1, 2, 3)]


class Traffic(RuleBasedStateMachine):
    """Every request is compared when it ends; the picture after every step."""

    host_blocks = 0
    blocks = 150

    @initialize()
    def start(self) -> None:
        self.rig = Rig(self.blocks, self.host_blocks)
        self.chats: list[Chat] = []
        self.requests: list[tuple[str, dict[str, Any]]] = []

    def ask(self, path: str, body: dict[str, Any], reply: str, **options: Any) -> None:
        finished = self.rig.ask(path, body, reply, **options)
        self.requests.append((path, body))
        assert finished.comparable
        assert finished.predicted_tokens is not None
        assert finished.cached_tokens is not None
        assert finished.predicted_tokens <= finished.cached_tokens + SIZE

    @rule(system=st.sampled_from(SYSTEMS), text=texts, reply=replies, first=st.booleans(), full=st.booleans())
    def new_chat(self, system: str, text: str, reply: str, first: bool, full: bool) -> None:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        self.say(Chat(messages), reply, first, full)

    @precondition(lambda self: self.chats)
    @rule(data=st.data(), text=texts, reply=replies, first=st.booleans(), full=st.booleans())
    def continue_chat(self, data: st.DataObject, text: str, reply: str, first: bool, full: bool) -> None:
        chat = data.draw(st.sampled_from(self.chats))
        self.say(Chat([*chat.messages, {"role": "user", "content": text}]), reply, first, full)

    def say(self, chat: Chat, reply: str, first: bool, full: bool) -> None:
        body = {"model": "m", "messages": chat.messages}
        if len(BPE.encode(chatml(chat.messages))) > 600:
            return
        self.ask("/v1/chat/completions", body, reply, events_first=first, full=full)
        self.chats.append(Chat([*chat.messages, {"role": "assistant", "content": reply}]))

    @precondition(lambda self: self.chats)
    @rule(data=st.data(), text=texts)
    def diverge_inside_a_message(self, data: st.DataObject, text: str) -> None:
        messages = [dict(m) for m in data.draw(st.sampled_from(self.chats)).messages]
        at = data.draw(st.integers(0, len(messages) - 1))
        cut = data.draw(st.integers(0, len(messages[at]["content"])))
        messages[at]["content"] = messages[at]["content"][:cut] + text
        self.say(Chat(messages[: at + 1]), "fine.", True, False)

    @rule(system=st.sampled_from(SYSTEMS), text=texts, reply=replies, salt=st.sampled_from(["", "tenant"]))
    def complete(self, system: str, text: str, reply: str, salt: str) -> None:
        body: dict[str, Any] = {"model": "m", "prompt": system + text} | ({"cache_salt": salt} if salt else {})
        self.ask("/v1/completions", body, reply)

    @rule(n=st.integers(1, 60), reply=replies)
    def complete_tokens(self, n: int, reply: str) -> None:
        self.ask("/v1/completions", {"model": "m", "prompt": [50 + i % 7 for i in range(n)]}, reply)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        self.ask(*data.draw(st.sampled_from(self.requests)), "again.")

    @rule()
    def cache_reset(self) -> None:
        self.rig.engine.reset()
        self.rig.residency.cleared(external=False)
        self.rig.flush()
        if not self.host_blocks:
            assert not self.rig.picture

    @rule()
    def events_lost_and_replayed(self) -> None:
        self.rig.residency.reset()
        self.rig.flush()
        assert not self.rig.picture
        log, self.rig.log = self.rig.log + self.rig.engine.events, []
        self.rig.engine.events = log
        self.rig.pump()
        self.rig.flush()

    @rule()
    def agent_restarts(self) -> None:
        """Saved map, event replay, the gate's ring."""
        saved = self.rig.residency.save()
        self.rig.residency = Residency(table(), SIZE, template=TEMPLATE, limits=Limits())
        self.rig.residency.restore(saved)
        self.rig.picture.clear()
        for note in self.rig.notes:
            self.rig.residency.arrival(note, DAY) if isinstance(note, Arrival) else self.rig.residency.end(note)
        self.rig.engine.events, self.rig.log = self.rig.log + self.rig.engine.events, []
        self.rig.pump()
        self.rig.flush()

    @invariant()
    def router_sees_the_snapshot_and_never_too_much(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.assert_picture_is_snapshot()
        for path, body in self.requests[-12:]:
            tokens = self.rig.render(path, body)
            cap = (len(tokens) - 1) // SIZE * SIZE
            actual = self.rig.engine.match(tokens, body.get("cache_salt", ""))
            assert min(self.rig.predicted(path, body), cap) <= actual + SIZE


class TrafficWithHost(Traffic):
    host_blocks = 120


_SETTINGS = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
TestTraffic = Traffic.TestCase
TestTraffic.settings = _SETTINGS
TestTrafficWithHost = TrafficWithHost.TestCase
TestTrafficWithHost.settings = _SETTINGS
