"""What the gate changes in a request's body: the client's label out, the engine's report mode in. Pure.

Most bodies need no change, and then none is made: a search for bytes decides, because parsing 128 KB for nothing would be
felt. Values are never re-serialised (`msgspec.Raw` keeps their bytes) except in the rare bodies that only the standard
library reads, as the engine does: NaN, a byte order mark, UTF-16.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

import msgspec

_LABEL: Final = "session_id"
_XARGS: Final = "vllm_xargs"
_REPORT: Final = {"kv_cache_report_mode": "full"}
# A key can hide from a search for its letters behind \u00.. escapes, or in UTF-16 or UTF-32 (which have NUL bytes).
_DISGUISES: Final = (b"\\u00", b"\0")

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Edited(NamedTuple):
    """The body for the engine; `full`: it now asks for reused blocks to be reported."""

    body: bytes
    full: bool


def edit(body: bytes, *, full: bool) -> Edited:
    """Remove a `session_id` of the client's (it would win over ours) and, if wanted, ask for the full report.

    A body that is not a JSON object passes as it is: the engine says what is wrong with it.
    """
    suspicious = _LABEL.encode() in body or any(sign in body for sign in _DISGUISES)
    if not suspicious and not full:
        return Edited(body, False)
    try:
        return _edit_raw(body, full)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _edit_plain(body, full)


def _edit_raw(body: bytes, full: bool) -> Edited:
    fields = _fields.decode(body)
    labelled = fields.pop(_LABEL, None) is not None
    reports = full and _ask_report(fields)
    if not labelled and not reports:
        return Edited(body, False)
    return Edited(msgspec.json.encode(fields), reports)


def _ask_report(fields: dict[str, msgspec.Raw]) -> bool:
    given = msgspec.json.decode(fields.get(_XARGS, b"null"))
    if given is not None and not isinstance(given, dict):
        return False  # the engine refuses it
    fields[_XARGS] = msgspec.Raw(msgspec.json.encode({**(given or {}), **_REPORT}))
    return True


def _edit_plain(body: bytes, full: bool) -> Edited:
    try:
        fields: Any = json.loads(body)
    except (ValueError, RecursionError):
        return Edited(body, False)
    if not isinstance(fields, dict):
        return Edited(body, False)
    labelled = fields.pop(_LABEL, None) is not None
    given = fields.get(_XARGS)
    reports = full and (given is None or isinstance(given, dict))
    if reports:
        fields[_XARGS] = {**(given or {}), **_REPORT}
    if not labelled and not reports:
        return Edited(body, False)
    return Edited(json.dumps(fields).encode(), reports)
