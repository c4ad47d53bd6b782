"""Token counts and replies out of answers of four APIs, streamed or not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prefixpool_agent.residency.answer import Answer, parse_answer

USAGE = {"prompt_tokens": 70, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 64}}
RESPONSES_USAGE = {"input_tokens": 70, "output_tokens": 9, "input_tokens_details": {"cached_tokens": 64}}
MESSAGES_USAGE = {"input_tokens": 2, "cache_read_input_tokens": 64, "cache_creation_input_tokens": 4, "output_tokens": 9}
LAST = {"choices": [], "usage": USAGE}
WHOLE = Answer(prompt_tokens=70, cached_tokens=64, output_tokens=9, reply="Hello there")


def one(document: Any) -> bytes:
    return json.dumps(document).encode()


def stream(*documents: Any, named: bool = False) -> bytes:
    events = [(f"event: {d['type']}\n" if named else "") + f"data: {json.dumps(d)}\n\n" for d in documents]
    return "".join([*events, "" if named else "data: [DONE]\n\n"]).encode()


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields}], "usage": None}


def block(text: str) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}


RESPONSE = {
    "object": "response",
    "output": [{"type": "message", "content": [{"type": "output_text", "text": "Hello there"}]}],
    "usage": RESPONSES_USAGE,
}


@pytest.mark.parametrize(
    "body",
    [
        one({"choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello there"}}], "usage": USAGE}),
        one({"choices": [{"index": 0, "text": "Hello there"}], "usage": USAGE}),
        stream(delta(role="assistant", content=""), delta(content="Hello"), delta(content=" there"), LAST),
        stream({"choices": [{"text": "Hello"}]}, {"choices": [{"text": " there"}]}, LAST),
        one(RESPONSE),
        stream(
            {"type": "response.created", "response": {"output": [], "usage": None}},
            {"type": "response.output_text.delta", "delta": "Hello there"},
            {"type": "response.completed", "response": RESPONSE},
            named=True,
        ),
        one({"type": "message", "content": [{"type": "text", "text": "Hello there"}], "usage": MESSAGES_USAGE}),
        stream(
            {"type": "message_start", "message": {"content": [], "usage": {"input_tokens": 70, "output_tokens": 0}}},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            block("Hello"),
            block(" there"),
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": MESSAGES_USAGE},
            {"type": "message_stop"},
            named=True,
        ),
    ],
)
def test_each_api_streamed_or_not_says_the_same(body: bytes) -> None:
    assert parse_answer(body) == WHOLE


@pytest.mark.parametrize(
    "body",
    [
        one({"choices": [{"message": {"content": "x", "tool_calls": [{"id": "1"}]}}]}),
        stream(delta(reasoning="hm"), delta(content="x")),
        one({"output": [{"type": "reasoning"}, {"type": "message", "content": [{"type": "output_text", "text": "x"}]}]}),
        one({"type": "message", "content": [{"type": "text", "text": "x"}, {"type": "tool_use", "input": {}}]}),
    ],
)
def test_tool_calls_and_reasoning_are_noticed(body: bytes) -> None:
    assert parse_answer(body) == Answer(reply="x", extras=True)


def test_several_choices_have_no_single_reply() -> None:
    two = [{"index": i, "message": {"content": "x"}} for i in range(2)]
    assert parse_answer(one({"choices": two, "usage": USAGE})).reply == ""


def test_no_details_means_unknown_not_zero() -> None:
    answer = parse_answer(one({"choices": [], "usage": {"prompt_tokens": 5, "prompt_tokens_details": None}}))
    assert (answer.prompt_tokens, answer.cached_tokens) == (5, None)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"data: {bad\n\n", b'{"choices": 7}', b"\xff\xfe", b'{"error": {"message": "x"}}']
)
def test_odd_answers_tell_nothing(body: bytes) -> None:
    assert parse_answer(body) == Answer()


def test_a_stream_that_breaks_off_still_tells_what_it_had() -> None:
    whole = stream(delta(content="Hel"), delta(content="lo"))
    assert parse_answer(whole[: whole.index(b'"lo"')]) == Answer(reply="Hel")
