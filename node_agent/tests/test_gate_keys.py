"""The engine key."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prefixpool.errors import SettingsError
from prefixpool_agent.gate.keys import KeyFile


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def bearer(key: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"authorization", b"Bearer " + key)]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text("first\n")
    return path


@pytest.mark.parametrize(
    ("headers", "accepted"),
    [
        (bearer(b"first"), True),
        ([(b"authorization", b"bearer first")], True),
        (bearer(b"firs"), False),
        (bearer(b"first2"), False),
        (bearer(b""), False),
        ([], False),
        ([(b"authorization", b"first")], False),
        ([(b"authorization", b"Basic first")], False),
        ([(b"x-api-key", b"first")], False),
        ([(b"authorization", b"Bearer first"), (b"authorization", b"Bearer other")], False),
        ([(b"authorization", b"Bearer \xff\xfe")], False),
    ],
)
def test_only_one_bearer_header_with_the_key_is_accepted(
    path: Path, headers: list[tuple[bytes, bytes]], accepted: bool
) -> None:
    assert KeyFile(path).accepts(headers) is accepted


def test_new_key_is_accepted_at_once_and_the_old_one_no_longer(path: Path, clock: Clock) -> None:
    keys = KeyFile(path, clock)
    replace(path, "second\n")
    assert keys.accepts(bearer(b"second"))
    assert not keys.accepts(bearer(b"first"))


def test_old_key_ends_within_a_second_even_if_nobody_uses_the_new_one(path: Path, clock: Clock) -> None:
    keys = KeyFile(path, clock)
    replace(path, "second\n")
    clock.now += 1.0
    assert not keys.accepts(bearer(b"first"))


def test_two_keys_are_valid_while_they_are_rotated(path: Path, clock: Clock) -> None:
    replace(path, "second\nfirst\n")
    keys = KeyFile(path, clock)
    assert keys.accepts(bearer(b"first"))
    assert keys.accepts(bearer(b"second"))


@pytest.mark.parametrize("change", ["remove", "empty"])
def test_lost_key_file_keeps_the_known_key(path: Path, clock: Clock, change: str) -> None:
    keys = KeyFile(path, clock)
    if change == "remove":
        path.unlink()
    else:
        replace(path, "\n")
    clock.now += 5
    assert keys.accepts(bearer(b"first"))
    assert not keys.accepts(bearer(b""))


def test_no_key_to_begin_with_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        KeyFile(tmp_path / "absent")
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(SettingsError, match="no engine key"):
        KeyFile(tmp_path / "empty")


def replace(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    os.replace(fresh, path)
