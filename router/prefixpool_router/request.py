"""A request's JSON body: reading it once, and the few edits that the router makes. Pure.

Edits never re-serialise values. A new field is spliced in before the closing brace (engines take the last of two equal keys,
so ours wins); where a field of the client's must go, the object is put together again from the raw bytes of its members.
Only a body with `NaN` or `Infinity`, which is not JSON but which engines accept, is re-serialised if something must go.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from prefixpool.errors import RequestError
from prefixpool_router.paths import Api

# Fields that steer an engine from inside (labels, isolation, transfer, scheduling); clients don't set them unless their key
# says so.
INTERNAL_FIELDS: Final = frozenset(
    {"session_id", "cache_salt", "kv_transfer_params", "vllm_xargs", "priority", "skip_reading_prefix_cache"}
)
_STREAM_USAGE: Final = frozenset({Api.CHAT, Api.COMPLETIONS})  # the others tell usage in their streams unasked
_RAW_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Edited(NamedTuple):
    """What the engine gets. `usage_added`: the client must not see the last usage chunk."""

    raw: bytes
    usage_added: bool


def parse_object(raw: bytes) -> dict[str, Any]:
    """The body as engines would read it. Raises RequestError 400, in words that say what is wrong but quote nothing."""
    try:
        body = msgspec.json.decode(raw)
    except RecursionError as error:
        raise RequestError(400, "The request body is nested too deeply.") from error
    except msgspec.MsgspecError:
        body = _parse_leniently(raw)
    if not isinstance(body, dict):
        raise RequestError(400, "The request body must be a JSON object.")
    return body


def _parse_leniently(raw: bytes) -> object:
    """Python's own parser decides what engines accept (1e400, NaN); only UTF-8, so that nobody reads it otherwise."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(400, "The request body is not valid UTF-8.") from error
    try:
        body: object = json.loads(text)
        json.dumps(body, ensure_ascii=False).encode("utf-8")  # lone surrogates have no bytes, hence no tokens
    except RecursionError as error:
        raise RequestError(400, "The request body is nested too deeply.") from error
    except UnicodeEncodeError as error:
        raise RequestError(400, "The request body contains half of a surrogate pair.") from error
    except ValueError as error:
        where = f" at byte {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise RequestError(400, f"The request body is not valid JSON{where}.") from error
    return body


def check_store(body: Mapping[str, Any]) -> None:
    """Raises RequestError 400 for a Responses request that needs stored state, which no replica has."""
    for field in ("previous_response_id", "store", "background"):
        if body.get(field):
            raise RequestError(400, f"This pool keeps no stored responses: `{field}` is not supported.", param=field)


def edit(api: Api, raw: bytes, body: Mapping[str, Any], *, allowed: frozenset[str], salt: str) -> Edited:
    """Apply the router's edits. `salt`: the scope's, "" for none; it replaces the client's even where that was allowed.

    `raw` comes back as the same object if nothing has to change.
    """
    remove = (INTERNAL_FIELDS - allowed).intersection(body)
    add: dict[str, Any] = {}
    if salt:
        add["cache_salt"] = salt
    usage = _usage_options(api, body)
    if usage is not None:
        add["stream_options"] = usage
    replaced = remove.union(field for field in add if field in body)
    if replaced:
        raw = _without(raw, body, replaced)
    empty = len(replaced) == len(body)
    return Edited(_with(raw, add, empty=empty) if add else raw, usage is not None)


def with_members(raw: bytes, members: Mapping[str, Any]) -> bytes:
    """A body that `edit` returned, and is not an empty object, with more members at its end."""
    return _with(raw, members, empty=False)


def _usage_options(api: Api, body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `stream_options` to send instead of the client's, or None to leave them alone."""
    if api not in _STREAM_USAGE or body.get("stream") is not True:
        return None
    options = body.get("stream_options")
    if options is None:
        return {"include_usage": True}
    if not isinstance(options, dict) or options.get("include_usage"):
        return None  # asked for by the client, or wrong in a way of which the engine will tell
    # Without include_usage the engine sends no continuous usage either, so with it that must be switched off.
    return {**options, "include_usage": True, "continuous_usage_stats": False}


def _without(raw: bytes, body: Mapping[str, Any], fields: frozenset[str]) -> bytes:
    try:
        members = _RAW_MEMBERS.decode(raw)
    except msgspec.MsgspecError:
        return json.dumps({k: v for k, v in body.items() if k not in fields}).encode()
    kept = (msgspec.json.encode(k) + b":" + bytes(v) for k, v in members.items() if k not in fields)
    return b"{" + b",".join(kept) + b"}"


def _with(raw: bytes, fields: Mapping[str, Any], *, empty: bool) -> bytes:
    end = raw.rindex(b"}")  # nothing but white space follows the object
    return b"%b%b%b%b" % (raw[:end], b"" if empty else b",", msgspec.json.encode(fields)[1:-1], raw[end:])
