"""Log lines of all programs: a constant message and its fields, one line each, as text or as JSON.

    2026-01-02T03:04:05.678Z info prefixpool_agent.agent state state=ready epoch=17

Fields are what a call passes in `extra`. Prompt text and token ids are never passed at any level that is on by default.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, TextIO

import msgspec

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class LogLevel(StrEnum):
    """Prompt text, token ids and keys are in no log line at any of these levels."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """One JSON object a line for machines, or words for a terminal."""

    JSON = "json"
    TEXT = "text"


def setup(level: str, *, json: bool = False, stream: TextIO | None = None) -> None:
    """Send everything of `level` and above to `stream` (standard error). Replaces earlier handlers."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if json else TextLines())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)


class TextLines(logging.Formatter):
    """For people."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={_shown(value)}" for name, value in _fields(record).items())
        head = f"{_time(record)} {record.levelname.lower()} {record.name} {record.getMessage()}{fields}"
        return f"{head}\n{self.formatException(record.exc_info)}" if record.exc_info else head


class JsonLines(logging.Formatter):
    """For log collectors."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _shown(value: Any) -> str:
    text = str(value)
    return repr(text) if not text or any(c.isspace() or c == '"' for c in text) else text
