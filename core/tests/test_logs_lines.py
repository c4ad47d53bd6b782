"""Log lines: message and fields on one line."""

from __future__ import annotations

import json
import logging

import pytest

from prefixpool.logs import JsonLines, TextLines


def record(**extra: object) -> logging.LogRecord:
    made = logging.getLogger("a.b").makeRecord("a.b", logging.WARNING, "f.py", 1, "gate %s", ("gone",), None, extra=extra)
    made.created = 1767323045.678
    return made


def test_text_line_carries_the_fields() -> None:
    line = TextLines().format(record(epoch=17, reason="out of memory"))
    assert line == "2026-01-02T03:04:05.678Z warning a.b gate gone epoch=17 reason='out of memory'"


def test_text_line_stays_one_line_whatever_a_field_holds() -> None:
    assert "\n" not in TextLines().format(record(reason="two\nlines"))


def test_json_line_carries_the_fields_with_their_types() -> None:
    line = json.loads(JsonLines().format(record(epoch=17, where=object)))
    assert (line["message"], line["epoch"], line["level"]) == ("gate gone", 17, "warning")


@pytest.mark.parametrize("kind", [TextLines, JsonLines])
def test_exception_is_shown(kind: type[logging.Formatter]) -> None:
    made = record()
    made.exc_info = (ValueError, ValueError("why"), None)
    assert "ValueError: why" in kind().format(made)
