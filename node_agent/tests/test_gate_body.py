"""Edits of request bodies."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prefixpool_agent.gate.body import edit


def test_ordinary_body_is_the_same_object() -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
    assert edit(body, full=False).body is body


def test_clients_session_id_is_removed_and_the_rest_keeps_its_bytes() -> None:
    body = b'{"a":1.0e5,"session_id":"evil","b":[ 1,  2 ],"c":"\\u00e9"}'
    assert edit(body, full=False).body == b'{"a":1.0e5,"b":[ 1,  2 ],"c":"\\u00e9"}'


@pytest.mark.parametrize(
    "key",
    ["session_id", "\\u0073ession_id", "session\\u005fid", "s\\u0065ssion_id"],
)
def test_session_id_behind_escapes_is_found(key: str) -> None:
    edited = edit(f'{{"x":1,"{key}":"evil"}}'.encode(), full=False)
    assert json.loads(edited.body) == {"x": 1}


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-le", "utf-8-sig"])
def test_session_id_in_other_encodings_is_found(encoding: str) -> None:
    """The engine reads bodies with json.loads, which guesses encodings."""
    body = json.dumps({"x": "é", "session_id": "evil"}).encode(encoding)
    assert json.loads(edit(body, full=False).body) == {"x": "é"}


def test_session_id_twice_is_removed_twice() -> None:
    assert json.loads(edit(b'{"session_id":"a","x":1,"session_id":"b"}', full=False).body) == {"x": 1}


def test_session_id_beside_nan_is_removed() -> None:
    body = b'{"session_id":"a","temperature":NaN}'
    assert b"session_id" not in edit(body, full=False).body


def test_session_id_in_text_or_deeper_changes_nothing() -> None:
    body = b'{"messages":[{"role":"user","content":"what is a session_id?"}],"metadata":{"session_id":"x"}}'
    assert edit(body, full=False).body is body


def test_full_report_is_asked_for() -> None:
    edited = edit(b'{"model":"m","prompt":"x"}', full=True)
    assert edited.full
    assert json.loads(edited.body)["vllm_xargs"] == {"kv_cache_report_mode": "full"}


@pytest.mark.parametrize("given", [{"a": 1}, None, {"kv_cache_report_mode": "none"}])
def test_full_report_joins_what_is_there(given: Any) -> None:
    edited = edit(json.dumps({"vllm_xargs": given}).encode(), full=True)
    assert edited.full
    assert json.loads(edited.body)["vllm_xargs"] == {**(given or {}), "kv_cache_report_mode": "full"}


@pytest.mark.parametrize("body", [b'{"vllm_xargs":[1]}', b'{"vllm_xargs":"x"}', b'{"vllm_xargs":3,"temperature":NaN}'])
def test_full_report_leaves_what_the_engine_will_refuse(body: bytes) -> None:
    edited = edit(body, full=True)
    assert edited.body is body
    assert not edited.full


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json session_id",
        b'["session_id"]',
        b'"session_id"',
        b"\xff\xfe\x00session_id",
        b'{"session_id":"a"',
        b'{"session_id":' + b"[" * 100_000 + b"]" * 100_000 + b"}x",
        b'{"a\\u00":1}',
    ],
)
@pytest.mark.parametrize("full", [False, True])
def test_broken_bodies_pass_as_they_are(body: bytes, full: bool) -> None:
    assert edit(body, full=full).body is body
