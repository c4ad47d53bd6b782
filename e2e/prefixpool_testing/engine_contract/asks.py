"""The same request in the words of each API, and what is read from the answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from random import Random
from typing import Any, Final, NamedTuple, TypeVar

from prefixpool_agent.engines.metrics import EngineLoad, parse_load
from prefixpool_testing.engine_worker import Answer, EngineWorker, KvListener
from prefixpool_testing.pool_client import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Body, Reply

APIS: Final = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
BLOCK: Final = 32  # of the workers under test
MODEL: Final = "contract"  # the name that they serve
PATIENCE_S: Final = 20.0
_WORDS: Final = ("river", "stone", "lamp", "orchard", "winter", "copper", "signal", "harbour", "needle", "market", "valley")
_POLL_S: Final = 0.02

Event = dict[str, Any]
T = TypeVar("T")


def text(name: str, words: int = 120) -> str:
    """Two names share no block: the digits in front differ."""
    draw = Random(name)
    return f"{draw.getrandbits(60)} {name}: " + " ".join(draw.choice(_WORDS) for _ in range(words)) + "."


def body_of(path: str, said: str, *, tokens: int = 4, **more: Any) -> Body:
    """A greedy request."""
    common = {"model": MODEL, "temperature": 0, **more}
    if path == COMPLETIONS:
        return {"prompt": said, "max_tokens": tokens, **common}
    if path == RESPONSES:
        return {"input": said, "max_output_tokens": tokens, "store": False, **common}
    return {"messages": [{"role": "user", "content": said}], "max_tokens": tokens, **common}


def ask(worker: EngineWorker, path: str, body: Body, **headers: str) -> Reply:
    """Raises AssertionError if it is refused. Header names with `_` for `-`."""
    answer = worker.post(path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    assert answer.status == 200, answer.body[:300]
    return Reply(answer.status, answer.headers, answer.body)


def labelled(worker: EngineWorker, path: str, body: Body) -> tuple[Reply, str]:
    """The answer, and the label that the gate gave the request."""
    since = len(worker.notes.notes)
    reply = ask(worker, path, body)
    arrival, _ = worker.notes.exchange(since)
    return reply, arrival.id


def tokens_of(worker: EngineWorker, **what: Any) -> list[int]:
    """Of a `prompt` or of `messages`, by the engine's own tokenizer and template."""
    answer = worker.post("/tokenize", {"model": MODEL, **what}).json()
    assert answer["count"] == len(answer["tokens"])
    return list(answer["tokens"])


def exactly(worker: EngineWorker, name: str, count: int) -> list[int]:
    """So many token ids of a text."""
    found = tokens_of(worker, prompt=text(name, count))
    assert len(found) >= count
    return found[:count]


def reusable(prompt: int) -> int:
    """Tokens of a prompt that a repeat finds: whole blocks, and at least one token is computed."""
    return (prompt - 1) // BLOCK * BLOCK


# -- streams


class Streamed(NamedTuple):
    """A whole stream."""

    events: list[Event]
    done: bool  # it ended as its API says

    @property
    def text(self) -> str:
        """What the model wrote."""
        return "".join(_written(event) for event in self.events)

    @property
    def usage(self) -> Event:
        """As told at the end, in the API's own words."""
        last = [event for event in self.events if event.get("usage") or (event.get("response") or {}).get("usage")][-1]
        return dict(last.get("usage") or last["response"]["usage"])


def stream(worker: EngineWorker, path: str, body: Body) -> Streamed:
    """Read to the end."""
    options = {"stream_options": {"include_usage": True}} if path in (CHAT, COMPLETIONS) else {}
    answer = worker.post(path, {**body, "stream": True, **options})
    assert answer.status == 200, answer.body[:300]
    return _read(answer)


def _read(answer: Answer) -> Streamed:
    data = [line[5:].strip() for line in answer.body.splitlines() if line.startswith(b"data:")]
    events = [json.loads(each) for each in data if each != b"[DONE]"]
    ended = data[-1] == b"[DONE]" or events[-1].get("type") in ("message_stop", "response.completed", "response.incomplete")
    return Streamed(events, ended)


def _written(event: Event) -> str:
    kind = event.get("type")
    if kind == "response.output_text.delta":
        return str(event["delta"])
    if kind == "content_block_delta":
        return str(event["delta"]["text"])
    choices = event.get("choices") or [{}]
    return str(choices[0].get("text") or (choices[0].get("delta") or {}).get("content") or "")


# -- metrics


def load_of(worker: EngineWorker) -> EngineLoad:
    """As the agent reads it."""
    return parse_load(worker.get("/metrics").body.decode())


def until_load(worker: EngineWorker, check: Callable[[EngineLoad], bool], within_s: float = PATIENCE_S) -> EngineLoad:
    """The first reading that passes. Raises AssertionError with the last one."""
    end = time.monotonic() + within_s
    while not check(load := load_of(worker)):
        assert time.monotonic() < end, f"not within {within_s:g} s; last: {load}"
        time.sleep(_POLL_S)  # noqa: TID251 - another process, no event loop
    return load


def quiet(load: EngineLoad) -> bool:
    """Nothing is under way."""
    return not load.running and not load.waiting


# -- KV events


def stored(events: KvListener, label: str, blocks: int) -> list[Event]:
    """What a request stored: at least so many blocks."""

    def find(seen: list[Event]) -> list[Event] | None:
        mine = [event for event in seen if event["type"] == "BlockStored" and event.get("session_id") == label]
        return mine if sum(len(event["block_hashes"]) for event in mine) >= blocks else None

    return events.wait(find)


class Chain(NamedTuple):
    """Blocks one behind the other."""

    before: int | None  # hash of the block in front of the first; None: it begins a prompt
    hashes: list[int]
    tokens: list[int]


def chain(found: list[Event]) -> Chain:
    """Raises AssertionError if an event does not hang on the one before it."""
    before: int | None = found[0]["parent_block_hash"]
    hashes: list[int] = []
    tokens: list[int] = []
    for event in found:
        assert event["parent_block_hash"] == (hashes[-1] if hashes else before)
        hashes += event["block_hashes"]
        tokens += event["token_ids"]
    return Chain(before, hashes, tokens)
