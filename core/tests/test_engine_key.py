"""One file for all who send or accept the pool's key, read by all of them alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixpool import engine_key
from prefixpool.errors import SettingsError


@pytest.mark.parametrize("content", [b"new\nold\n", b"new\r\nold", b"\n  new  \n\nold", b"new\rold"])
def test_the_first_is_sent_and_all_are_accepted(content: bytes) -> None:
    assert engine_key.sent(content) == "new"
    assert engine_key.accepted(content) == (b"new", b"old")


@pytest.mark.parametrize("content", [b"", b"\n\n", b" \r\n"])
def test_a_file_without_a_key(content: bytes, tmp_path: Path) -> None:
    assert engine_key.accepted(content) == ()
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(SettingsError, match=r"engine key file .*/key: no engine key in it"):
        engine_key.read_sent(tmp_path / "key")


@pytest.mark.parametrize("content", ["schl\u00fcssel".encode(), b"\xff\xfe", b"a\x00b", b"a\x7fb"])
def test_what_could_not_stand_in_a_header_is_refused(content: bytes) -> None:
    with pytest.raises(SettingsError, match="an engine key is of"):
        engine_key.sent(content)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"engine key file .*/key: No such file or directory"):
        engine_key.read_sent(tmp_path / "key")
