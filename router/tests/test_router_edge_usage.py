"""Usage out of all four APIs, and the usage chunk that a client did not ask for."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixpool_router.usage import UNKNOWN, StreamMeter, Usage, usage_of_answer
from prefixpool_testing.backend import event

CHAT = {"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 96}}
CONTENT = event({"choices": [{"index": 0, "delta": {"content": 'say "usage" \n\n twice'}}]})
USAGE = event({"choices": [], "usage": CHAT})
DONE = event(b"[DONE]")


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (CHAT, Usage(100, 96, 7)),
        ({"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": None}, Usage(9, None, 1)),
        ({"prompt_tokens": 9, "total_tokens": 9}, Usage(9, None, None)),
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}}, Usage(9, 0, None)),
        ({"input_tokens": 50, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 32}}, Usage(50, 32, 3)),
        # Anthropic: input_tokens excludes what was read from and written to the cache.
        (
            {"input_tokens": 9, "cache_read_input_tokens": 1024, "cache_creation_input_tokens": 64, "output_tokens": 2},
            Usage(1097, 1024, 2),
        ),
        ({"input_tokens": 9, "output_tokens": 2}, Usage(9, None, 2)),
        ({"prompt_tokens": "many"}, UNKNOWN),
        (None, UNKNOWN),
    ],
)
def test_usage_of_whole_answers(usage: object, expected: Usage) -> None:
    assert usage_of_answer(json.dumps({"choices": [], "usage": usage}).encode()) == expected


@pytest.mark.parametrize("figure", [-1, -(10**30), 10**400], ids=["less than none", "far less", "more than a float holds"])
@pytest.mark.parametrize("field", ["prompt_tokens", "completion_tokens", "cached_tokens"])
def test_a_good_answer_became_a_500_because_of_a_nonsensical_count(field: str, figure: int) -> None:
    told = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
    told |= {"prompt_tokens_details": {field: figure}} if field == "cached_tokens" else {field: figure}
    body = b'{"usage":%b}' % json.dumps(told).encode()
    expected = {
        "prompt_tokens": Usage(None, 0, 1),
        "completion_tokens": Usage(9, 0, None),
        "cached_tokens": Usage(9, None, 1),
    }
    assert usage_of_answer(body) == expected[field]


@pytest.mark.parametrize("body", [b"", b"{}", b"not json", b'["usage"]', b'{"usage":', b'{"text":"\\"usage\\""}'])
def test_no_usage_is_unknown_not_zero(body: bytes) -> None:
    assert usage_of_answer(body) == UNKNOWN


def test_anthropic_streams_tell_the_truth_at_the_end_only() -> None:
    meter = StreamMeter(withhold=False)
    start = event(
        {"type": "message_start", "message": {"usage": {"input_tokens": 1097, "output_tokens": 0}}}, "message_start"
    )
    meter.feed(start)
    assert meter.usage == UNKNOWN  # not yet aware of the cache
    usage = {"input_tokens": 9, "cache_read_input_tokens": 1088, "cache_creation_input_tokens": 0, "output_tokens": 4}
    meter.feed(event({"type": "message_delta", "usage": usage}, "message_delta"))
    assert meter.usage == Usage(1097, 1088, 4)


def test_responses_streams_tell_it_inside_the_response() -> None:
    meter = StreamMeter(withhold=False)
    meter.feed(event({"type": "response.created", "response": {"usage": None}}, "response.created"))
    usage = {"input_tokens": 10, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 8}}
    meter.feed(event({"type": "response.completed", "response": {"usage": usage}}, "response.completed"))
    assert meter.usage == Usage(10, 8, 2)


def test_chunks_without_usage_pass_as_the_same_object() -> None:
    meter = StreamMeter(withhold=True)
    assert meter.feed(CONTENT) is CONTENT


def test_the_usage_chunk_is_withheld_and_nothing_else() -> None:
    meter = StreamMeter(withhold=True)
    assert [meter.feed(chunk) for chunk in (CONTENT, USAGE, DONE)] == [CONTENT, b"", DONE]
    assert meter.usage == Usage(100, 96, 7)
    assert meter.end() == b""


def test_the_usage_chunk_is_cut_out_of_a_larger_one() -> None:
    meter = StreamMeter(withhold=True)
    assert meter.feed(CONTENT + USAGE + DONE) == CONTENT + DONE


def test_usage_beside_choices_is_no_usage_chunk() -> None:
    meter = StreamMeter(withhold=True)
    both = event({"choices": [{"index": 0, "text": "x"}], "usage": {"prompt_tokens": 5, "completion_tokens": 1}})
    assert meter.feed(both) == both
    assert meter.usage == Usage(5, None, 1)


def test_a_null_usage_is_no_usage_chunk() -> None:
    meter = StreamMeter(withhold=True)
    chunk = event({"choices": [], "prompt_filter_results": [], "usage": None})
    assert meter.feed(chunk) == chunk
    assert meter.usage == UNKNOWN


def test_an_unfinished_event_goes_out_as_soon_as_it_can_not_be_the_usage_chunk() -> None:
    meter = StreamMeter(withhold=True)
    assert meter.feed(b'data: {"id":"x","cho') == b""
    assert meter.feed(b'ices":[{"index":0,') == b'data: {"id":"x","choices":[{"index":0,'
    assert meter.mid_event
    assert meter.feed(b'"text":"t"}],"usage":null}\n\n') == b'"text":"t"}],"usage":null}\n\n'
    assert not meter.mid_event


def test_without_withholding_bytes_pass_as_they_come() -> None:
    meter = StreamMeter(withhold=False)
    for piece in (b"da", b'ta: {"choices":[],"usa', b'ge":{"prompt_tokens":3}}', b"\n", b"\ndata: [DONE]\n\n"):
        assert meter.feed(piece) == piece
    assert meter.usage == Usage(3, None, None)


def test_an_endless_event_is_passed_on_and_not_kept() -> None:
    meter = StreamMeter(withhold=True)
    block = b"data: " + b"x" * 100_000
    assert b"".join(meter.feed(block) for _ in range(10)) + meter.end() == block * 10


@given(
    cuts=st.lists(st.integers(0, 1 << 16), max_size=12),
    newline=st.sampled_from([b"\n", b"\r\n"]),
    parts=st.lists(
        st.sampled_from([CONTENT, USAGE, DONE, b": ping\n\n", event({"choices": [], "usage": None})]), max_size=8
    ),
    tail=st.sampled_from([b"", b"data: {", b'data: {"choices":[],"usage":{"prompt_tokens":1}}']),
)
def test_however_a_stream_is_cut_only_usage_chunks_are_missing(
    cuts: list[int], newline: bytes, parts: list[bytes], tail: bytes
) -> None:
    stream = b"".join(parts).replace(b"\n", newline) + tail
    expected = b"".join(part for part in parts if part is not USAGE).replace(b"\n", newline)
    expected += b"" if b"prompt_tokens" in tail else tail
    places = sorted({0, *(cut % (len(stream) + 1) for cut in cuts), len(stream)})
    meter = StreamMeter(withhold=True)
    pieces = [stream[a:b] for a, b in itertools.pairwise(places)]
    assert b"".join(meter.feed(piece) for piece in pieces) + meter.end() == expected
    keeping = StreamMeter(withhold=False)
    assert b"".join(keeping.feed(piece) for piece in pieces) == stream
    if USAGE in parts and not tail:
        assert meter.usage == keeping.usage == Usage(100, 96, 7)
