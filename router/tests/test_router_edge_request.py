"""Reading and editing request bodies: what goes in unchanged comes out unchanged."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixpool.errors import RequestError
from prefixpool_router.paths import Api
from prefixpool_router.request import INTERNAL_FIELDS, check_store, edit, parse_object

NOTHING: frozenset[str] = frozenset()


def edited(raw: bytes, *, api: Api = Api.CHAT, allowed: frozenset[str] = NOTHING, salt: str = "") -> bytes:
    return edit(api, raw, parse_object(raw), allowed=allowed, salt=salt).raw


def test_a_body_without_need_of_edits_is_the_same_object() -> None:
    raw = b'{ "model" : "m", "x": 1e400, "big": 123456789012345678901234567890, "messages":[] }'
    assert edited(raw) is raw


def test_unknown_fields_order_and_numbers_survive_an_edit() -> None:
    raw = b'{"z":-0.0,"priority":5,"tools":[{"function":{"name":"f","parameters":{"b":1}}}],"n":1e400,"i":9007199254740993}'
    assert edited(raw) == (
        b'{"z":-0.0,"tools":[{"function":{"name":"f","parameters":{"b":1}}}],"n":1e400,"i":9007199254740993}'
    )


@pytest.mark.parametrize("field", sorted(INTERNAL_FIELDS))
def test_internal_fields_are_taken_out(field: str) -> None:
    raw = json.dumps({"model": "m", field: "client", "messages": []}).encode()
    assert parse_object(edited(raw)) == {"model": "m", "messages": []}
    assert edited(raw, allowed=frozenset({field})) is raw


@pytest.mark.parametrize(
    "raw",
    [
        b'{"cache_salt":"mine","cache_salt":"mine too"}',
        b'{"cache\\u005fsalt":"mine"}',
        b'{"\\u0063ache_salt":"mine", "model":"m"}',
        b'{"cache_salt":{"cache_salt":"mine"}}',
        b'{"n": NaN, "cache_salt":"mine"}',
        b'{"n": 1e400, "cache_salt":"mine"}',
        b' \n{"cache_salt":"mine"}\n ',
    ],
)
def test_no_spelling_of_a_clients_salt_reaches_the_engine(raw: bytes) -> None:
    for out in (edited(raw), edited(raw, salt="ours")):
        assert b"mine" not in out
    assert json.loads(edited(raw, salt="ours"))["cache_salt"] == "ours"
    # Engines may read either of two equal keys: there must be one only.
    assert (
        json.loads(edited(raw, salt="ours"), object_pairs_hook=lambda pairs: [k for k, _ in pairs]).count("cache_salt") == 1
    )


def test_a_salt_inside_another_field_is_none_of_our_business() -> None:
    raw = b'{"metadata":{"cache_salt":"x"},"messages":[{"content":"\\"cache_salt\\": 1}"}]}'
    assert edited(raw) is raw
    assert edited(raw, salt="s") == raw[:-1] + b',"cache_salt":"s"}'


def test_the_salt_is_spliced_in_before_the_end() -> None:
    assert edited(b"{}", salt="s") == b'{"cache_salt":"s"}'
    assert edited(b'{ "a":1 }\n', salt="s") == b'{ "a":1 ,"cache_salt":"s"}\n'
    assert edited(b'{"priority":1}', salt="s") == b'{"cache_salt":"s"}'


def test_even_an_allowed_client_salt_is_replaced_by_the_scopes() -> None:
    out = edited(b'{"cache_salt":"a","model":"m"}', allowed=frozenset({"cache_salt"}), salt="scope")
    assert out == b'{"model":"m","cache_salt":"scope"}'


@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS])
def test_stream_usage_is_asked_for_when_the_client_did_not(api: Api) -> None:
    raw = b'{"model":"m","stream":true}'
    result = edit(api, raw, parse_object(raw), allowed=NOTHING, salt="")
    assert result.usage_added
    assert result.raw == b'{"model":"m","stream":true,"stream_options":{"include_usage":true}}'


@pytest.mark.parametrize(
    "options", [{"include_usage": False}, {"include_usage": False, "continuous_usage_stats": True}, None, {}]
)
def test_stream_usage_that_was_declined_is_asked_for_quietly(options: Any) -> None:
    raw = json.dumps({"stream": True, "stream_options": options}).encode()
    result = edit(Api.CHAT, raw, parse_object(raw), allowed=NOTHING, salt="")
    sent = json.loads(result.raw)["stream_options"]
    assert result.usage_added
    assert sent["include_usage"] is True
    assert not sent.get("continuous_usage_stats")  # or every chunk would carry usage, which the client declined


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (Api.CHAT, {"stream": True, "stream_options": {"include_usage": True}}),
        (Api.CHAT, {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
        (Api.CHAT, {"stream": True, "stream_options": "wrong"}),
        (Api.CHAT, {"stream": False}),
        (Api.CHAT, {}),
        (Api.MESSAGES, {"stream": True}),
        (Api.RESPONSES, {"stream": True}),
    ],
)
def test_stream_options_are_left_alone_where_there_is_nothing_to_add(api: Api, body: Any) -> None:
    raw = json.dumps(body).encode()
    result = edit(api, raw, body, allowed=NOTHING, salt="")
    assert result.raw is raw
    assert not result.usage_added


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"{} {}", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b'{"a":"\xff"}', "not valid UTF-8"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        ('{"cache_salt":"mine"}'.encode("utf-16"), "not valid UTF-8"),
        ('{"cache_salt":"mine"}'.encode("utf-16-be"), "not valid JSON"),
        (b'{"a":"\\ud800"}', "surrogate"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"n":NaN,"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"a":' + b"1" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_bad_bodies_get_a_clear_400(raw: bytes, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        parse_object(raw)
    assert caught.value.status == 400
    assert "mine" not in caught.value.message


def test_what_only_engines_accept_is_accepted() -> None:
    assert parse_object(b'{"a":1e400,"b":"\\u00e9"}') == {"a": float("inf"), "b": "é"}


@pytest.mark.parametrize("body", [{"store": True}, {"previous_response_id": "resp_1"}, {"background": True, "input": "x"}])
def test_stored_responses_are_refused_by_name(body: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="keeps no stored responses") as caught:
        check_store(body)
    assert caught.value.status == 400
    assert caught.value.param in body


def test_responses_without_state_pass() -> None:
    check_store({"input": "x", "store": False, "previous_response_id": None})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)


@given(
    body=st.dictionaries(
        st.sampled_from([*sorted(INTERNAL_FIELDS), "model", "messages", "stream", "x"]) | st.text(), json_values
    ),
    allowed=st.sets(st.sampled_from(sorted(INTERNAL_FIELDS))),
    salt=st.sampled_from(["", "salt"]),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 1]),
)
def test_edits_change_nothing_else(
    body: dict[str, Any], allowed: set[str], salt: str, ascii_only: bool, indent: Any
) -> None:
    raw = json.dumps(body, ensure_ascii=ascii_only, indent=indent).encode()
    result = edit(Api.COMPLETIONS, raw, parse_object(raw), allowed=frozenset(allowed), salt=salt)
    expected = {k: v for k, v in body.items() if k not in INTERNAL_FIELDS or k in allowed}
    if salt:
        expected["cache_salt"] = salt
    got = json.loads(result.raw)
    if result.usage_added:
        assert got.pop("stream_options")["include_usage"] is True
        expected.pop("stream_options", None)
    assert got == expected
