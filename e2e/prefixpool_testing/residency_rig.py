"""Engine, residency and a router's picture in one hand: what the tests of the residency join drive."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from prefixpool.chain import canonical, prefix_chain
from prefixpool.note import Arrival, End
from prefixpool.wire import Template, Tier
from prefixpool_agent.residency import Finished, Limits, Residency, TokenTable, load_table
from prefixpool_testing.paged_engine import PagedEngine, Running
from prefixpool_testing.tiny_bpe import TinyBpe

SIZE: Final = 8  # tokens a block
DAY: Final = "2026-01-01"
LIMITS: Final = Limits()
TEMPLATE: Final = Template(digest="chatml", renders_tools=False)
CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"


def chatml(messages: list[dict[str, str]]) -> str:
    """The template that the rig's engine uses."""
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages) + "<|im_start|>assistant\n"


class Rig:
    """Engine, residency, and a router's picture that is fed by changes only."""

    def __init__(self, model: Path, blocks: int = 2000, host_blocks: int = 0, limits: Limits = LIMITS) -> None:
        """`model`: a folder with a small tokenizer.json."""
        self.bpe = TinyBpe(model / "tokenizer.json")
        self.table: TokenTable = load_table(model)
        self.limits = limits
        self.engine = PagedEngine(blocks, SIZE, host_blocks)
        self.residency = self.fresh()
        self.picture: dict[tuple[Tier, int], int] = {}
        self.log: list[dict[str, Any]] = []
        self.notes: list[Arrival | End] = []
        self.count = 0

    def fresh(self) -> Residency:
        """A residency that knows nothing, as of an agent that has just started."""
        return Residency(self.table, SIZE, template=TEMPLATE, limits=self.limits)

    def render(self, path: str, body: dict[str, Any]) -> list[int]:
        """Token ids of the prompt, as the engine would make them."""
        if path == COMPLETIONS:
            prompt = body["prompt"]
            return prompt if isinstance(prompt, list) else self.bpe.encode(prompt)
        return self.bpe.encode(chatml(body["messages"]))

    def pump(self) -> None:
        """Hand the engine's events over."""
        events, self.engine.events = self.engine.events, []
        self.log += events
        for event in events:
            self.residency.event(event)

    def replay(self) -> None:
        """All events since the engine started, once more."""
        self.engine.events, self.log = self.log + self.engine.events, []
        self.pump()
        self.flush()

    def flush(self) -> None:
        """Apply what changed to the router's picture."""
        changes = self.residency.flush()
        for tier, rows in changes.publish.items():
            for hash_, depth in rows:
                self.picture[tier, hash_] = depth
        for tier, hashes in changes.retract.items():
            for hash_ in hashes:
                del self.picture[tier, hash_]

    def arrive(self, path: str, body: dict[str, Any], full: bool = False) -> Running:
        """The gate's note, then the engine's prefill; its events are not handed over yet."""
        self.count += 1
        note = Arrival(f"r{self.count}", 1.0, path, json.dumps(body).encode(), full)
        self.notes.append(note)
        self.residency.arrival(note, DAY)
        return self.engine.begin(note.id, self.render(path, body), salt=body.get("cache_salt", ""), full=full)

    def answer(self, path: str, run: Running, prompt: int, reply: str, output: int) -> End:
        """The gate's note of the end."""
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "prompt_tokens_details": {"cached_tokens": run.cached},
        }
        choice = {"text": reply} if path == COMPLETIONS else {"message": {"content": reply}}
        return End(run.id, 1.5, 2.0, 200, json.dumps({"choices": [choice], "usage": usage}).encode())

    def ask(
        self, path: str, body: dict[str, Any], reply: str = "", *, events_first: bool = True, full: bool = False
    ) -> Finished:
        """One request from its arrival to its end, at concurrency 1."""
        run = self.arrive(path, body, full)
        prompt = len(run.tokens)
        output = [*self.bpe.encode(reply), 2]
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

    def ask_together(self, path: str, bodies: list[dict[str, Any]], reply: str, *, events_late: bool) -> None:
        """Requests that overlap, all with the same reply. `events_late`: the engine's events come after all notes."""
        output = [*self.bpe.encode(reply), 2]
        runs = []
        for body in bodies:
            runs.append((self.arrive(path, body), len(self.render(path, body))))
            if not events_late:
                self.pump()
        for run, prompt in runs:
            self.engine.finish(run, output)
            if not events_late:
                self.pump()
                self.flush()
            note = self.answer(path, run, prompt, reply, len(output))
            self.notes.append(note)
            self.residency.end(note)
        self.pump()
        self.flush()

    def chat(self, messages: list[dict[str, str]], reply: str = "", **options: Any) -> Finished:
        """`ask()` by messages."""
        return self.ask(CHAT, {"model": "m", "messages": messages}, reply, **options)

    def predicted(self, path: str, body: dict[str, Any]) -> int:
        """As a router sees it from the changes alone: the first boundary that is missing ends the prefix.

        Those less than one block deep do not count as missing.
        """
        best = 0
        for depth in self.depths(path, body):
            if depth is None and best >= SIZE:
                break
            best = max(best, depth or 0)
        return best // SIZE * SIZE

    def depths(self, path: str, body: dict[str, Any]) -> list[int | None]:
        """Published token depth of each boundary of a request, None where it is not published."""
        request = canonical(path, body, template=TEMPLATE, salt=body.get("cache_salt", ""), day=DAY)
        assert request is not None
        return [self._depth(hash_) for hash_ in prefix_chain(request).hashes]

    def _depth(self, hash_: int) -> int | None:
        found = (self.picture.get((tier, hash_)) for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK))
        return next((depth for depth in found if depth is not None), None)

    def assert_nothing_in_snapshot(self) -> None:
        """Before a flush, too."""
        assert list(self.residency.snapshot()) == []

    def assert_picture_is_snapshot(self) -> None:
        """All changes so far, applied, are what a router that connects now would get."""
        shot = {
            (tier, hash_): depth
            for tier, hashes, depths in self.residency.snapshot()
            for hash_, depth in zip(hashes, depths, strict=True)
        }
        assert shot == self.picture
