"""Paths, headers, API keys, scopes and their salts."""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

import pytest
from multidict import CIMultiDict

from prefixpool.errors import RequestError, SettingsError
from prefixpool_router.auth import Grant, KeyRing, scope_salt
from prefixpool_router.credentials import Credentials
from prefixpool_router.headers import for_client, for_engine, request_id
from prefixpool_router.paths import Api, route
from prefixpool_router.settings import RouterSettings


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.mark.parametrize(
    ("path", "api", "parsed"),
    [
        ("/v1/chat/completions", Api.CHAT, True),
        ("/v1/messages/count_tokens", Api.COUNT_TOKENS, True),
        ("/v1/models", Api.MODELS, False),
        ("/tokenize", Api.TOKENIZE, False),
        ("/v1/audio/transcriptions", Api.OTHER, False),
        ("/v1/models/org%2Fname", Api.OTHER, False),
    ],
)
def test_known_paths(path: str, api: Api, parsed: bool) -> None:
    found = route(path, engine_store=False)
    assert (found.api, found.parsed) == (api, parsed)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/metrics",
        "/v1",
        "/v1/",
        "/v2/x",
        "/v1/responses/resp_1",
        # Spellings that an engine would take for a path that must be edited.
        "/v1/chat%2Fcompletions",
        "/v1/chat/%63ompletions",
        "/v1/chat/completions/",
        "/v1//chat/completions",
        "/v1/x/../chat/completions",
        "/v1/%2e%2e/metrics",
        "/v1/./completions",
        "/v1/a\\b",
        "/v1/a%0d%0ab",
        "/v1/models#x",
        "/v1/x%3fy",
        "http://elsewhere/v1/models",
    ],
)
def test_paths_that_do_not_exist_or_are_ambiguous_are_not_found(path: str) -> None:
    with pytest.raises(RequestError) as caught:
        route(path, engine_store=False)
    assert caught.value.status == 404


def test_stored_responses_pass_where_engines_keep_them() -> None:
    assert route("/v1/responses/resp_1", engine_store=True).api is Api.OTHER


def test_key_file_with_scopes_and_permissions() -> None:
    ring = KeyRing.parse(f"# team keys\n\n{digest('k1')} red\n{digest('k2')}  red  allow=priority,policy\n")
    assert ring.check({"authorization": "Bearer k1"}) == Grant("red")
    assert ring.check({"authorization": "bearer  k2"}) == Grant("red", frozenset({"priority", "policy"}))
    assert ring.check({"x-api-key": "k1"}) == Grant("red")


@pytest.mark.parametrize("words", ["allow=policy reserve=90", "reserve=90 allow=policy", "reserve=9e1   allow=policy"])
def test_a_key_may_reserve_its_prompts(words: str) -> None:
    ring = KeyRing.parse(f"{digest('k')} red {words}\n{digest('other')} red reserve=1.5")
    assert ring.check({"x-api-key": "k"}) == Grant("red", frozenset({"policy"}), 90.0)
    assert ring.check({"x-api-key": "other"}) == Grant("red", frozenset(), 1.5)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic k1"},
        {"x-api-key": "wrong"},
        {"authorization": f"Bearer {digest('k1')}"},
        {"authorization": "Bearer \udcff"},
    ],
)
def test_missing_and_unknown_keys_are_401(fields: dict[str, str]) -> None:
    with pytest.raises(RequestError) as caught:
        KeyRing.parse(f"{digest('k1')} red").check(fields)
    assert caught.value.status == 401
    assert "wrong" not in caught.value.message


def test_an_empty_key_file_lets_nobody_in() -> None:
    with pytest.raises(RequestError):
        KeyRing.parse("# none yet\n").check({"authorization": "Bearer k1"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sk-plain-key red", "line 1: the first word is not a SHA-256"),
        (f"\n{digest('k')}", "line 2: expected"),
        (f"{digest('k')} red allow=everything", "allow= must be any of"),
        (f"{digest('k')} red priority", "may be allow= and reserve="),
        (f"{digest('k')} red allow=policy allow=priority", "once each"),
        (f"{digest('k')} red reserve=1 reserve=2", "once each"),
        (f"{digest('k')} red allow=policy reserve=1 more", "found 5 words"),
        (f"{digest('k')} red reserve=soon", "must be seconds, at most 604800"),
        (f"{digest('k')} red reserve=0", "must be seconds"),
        (f"{digest('k')} red reserve=-5", "must be seconds"),
        (f"{digest('k')} red reserve=inf", "must be seconds"),
        (f"{digest('k')} red reserve=nan", "must be seconds"),
        (f"{digest('k')} red\n{digest('k')} blue", "line 2: this key is listed twice"),
    ],
)
def test_a_wrong_key_file_is_refused_without_quoting_it(text: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        KeyRing.parse(text)
    assert "plain" not in str(caught.value)


def test_salts_are_hmacs_over_length_prefixed_parts() -> None:
    key = b"0123456789abcdef"
    label = b"prefixpool cache salt 1"
    message = b"".join(len(part).to_bytes(8, "big") + part for part in (label, b"red", b""))
    assert scope_salt(key, "red") == hmac.new(key, message, hashlib.sha256).hexdigest()


def test_no_two_scopes_and_salts_share_a_salt() -> None:
    key = b"0123456789abcdef"
    pairs = [("", ""), ("a", ""), ("", "a"), ("ab", "c"), ("a", "bc"), ("abc", "")]
    assert len({scope_salt(key, *pair) for pair in pairs}) == len(pairs)
    assert scope_salt(b"another key here", "a") != scope_salt(key, "a")
    assert scope_salt(b"", "a") == ""


def test_scopes_without_a_salt_key_are_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{digest('k')} red\n")
    with pytest.raises(SettingsError, match="salt-key-file"):
        Credentials(RouterSettings(keys_file=str(tmp_path / "keys")))


def test_keys_are_read_again_and_a_bad_file_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys, salt = tmp_path / "keys", tmp_path / "salt"
    keys.write_text(f"{digest('k1')} red\n")
    salt.write_text("0123456789abcdef")
    credentials = Credentials(RouterSettings(keys_file=str(keys), salt_key_file=str(salt)))
    keys.write_text(f"{digest('k2')} blue\n")
    credentials.refresh()
    assert credentials.check({"authorization": "Bearer k2"}).scope == "blue"
    with pytest.raises(RequestError):
        credentials.check({"authorization": "Bearer k1"})
    keys.write_text("sk-secret-by-mistake red")
    credentials.refresh()
    keys.unlink()
    credentials.refresh()
    assert credentials.check({"authorization": "Bearer k2"}).scope == "blue"
    assert "sk-secret" not in caplog.text


def test_a_file_that_changed_without_a_sign_on_its_outside_was_not_read_again(tmp_path: Path) -> None:
    keys, salt = tmp_path / "keys", tmp_path / "salt"
    keys.write_text(f"{digest('k1')} red\n")
    salt.write_text("0123456789abcdef")
    credentials = Credentials(RouterSettings(keys_file=str(keys), salt_key_file=str(salt)))
    before = keys.stat()
    keys.write_text(f"{digest('k2')} red\n")  # within the same tick of the file system's clock, say
    os.utime(keys, ns=(before.st_atime_ns, before.st_mtime_ns))
    credentials.refresh()
    assert credentials.check({"authorization": "Bearer k2"}).scope == "red"


def test_a_pipe_in_place_of_a_key_file_hung_the_router_for_ever(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys, salt = tmp_path / "keys", tmp_path / "salt"
    keys.write_text(f"{digest('k1')} red\n")
    salt.write_text("0123456789abcdef")
    credentials = Credentials(RouterSettings(keys_file=str(keys), salt_key_file=str(salt)))
    keys.unlink()
    os.mkfifo(keys)
    credentials.refresh()
    assert credentials.check({"authorization": "Bearer k1"}).scope == "red"
    assert "not a regular file" in caplog.records[-1].cause  # type: ignore[attr-defined]
    with pytest.raises(SettingsError, match="not a regular file"):  # `--keys-file <(…)`: empty when it is read again
        Credentials(RouterSettings(keys_file=str(keys), salt_key_file=str(salt)))


def test_headers_for_the_engine() -> None:
    kept = {"anthropic-version": "2023-06-01", "TraceParent": "00-1-2-01"}
    fields = CIMultiDict(
        {
            "Host": "pool",
            "Authorization": "Bearer client",
            "X-Api-Key": "client",
            "Connection": "keep-alive, X-Hop",
            "X-Hop": "1",
            "Transfer-Encoding": "chunked",
            "Content-Length": "5",
            "Accept-Encoding": "gzip",
            "X-Session-ID": "label",
            "X-Vllm-Priority": "-1",
            "X-data-parallel-rank": "0",
            "X-Prefixpool-Policy": "random",
            "X-Request-ID": "dropped for the checked one",
            **kept,
        }
    )
    sent = for_engine(fields, api=Api.CHAT, request_id="r1", engine_key="pool-key", priority_allowed=False)
    assert dict(sent) == {**kept, "x-request-id": "r1", "Authorization": "Bearer pool-key"}
    allowed = for_engine(fields, api=Api.OTHER, request_id="r1", engine_key="", priority_allowed=True)
    assert allowed["X-Vllm-Priority"] == "-1"
    assert allowed["Accept-Encoding"] == "gzip"
    assert "Authorization" not in allowed


def test_headers_for_the_client() -> None:
    fields = CIMultiDict(
        [("Content-Type", "a/b"), ("Set-Cookie", "a=1"), ("Set-Cookie", "b=2"), ("Connection", "close, x"), ("X", "1")]
    )
    fields["x-prefixpool-replica"] = "spoofed"
    got = for_client(fields, {"x-prefixpool-replica": "p-0"})
    assert list(got.items()) == [
        ("Content-Type", "a/b"),
        ("Set-Cookie", "a=1"),
        ("Set-Cookie", "b=2"),
        ("x-prefixpool-replica", "p-0"),
        ("Server", "prefixpool"),
    ]


def test_headers_that_a_second_connection_line_names_went_on() -> None:
    fields = CIMultiDict(
        [("Connection", "close, x-one"), ("X-One", "1"), ("connection", "X-Two"), ("X-Two", "2"), ("X", "3")]
    )
    up = for_engine(fields, api=Api.CHAT, request_id="r1", engine_key="", priority_allowed=False)
    assert dict(up) == {"X": "3", "x-request-id": "r1"}
    assert dict(for_client(fields, {})) == {"X": "3", "Server": "prefixpool"}


def test_request_ids() -> None:
    assert request_id({"x-request-id": "abc-1"}) == "abc-1"
    made = request_id({"x-request-id": "two words"})
    assert len(made) == 32
    assert request_id({}) != made
    assert request_id({"x-request-id": "x" * 201}) != "x" * 201
