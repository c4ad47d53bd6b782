"""Which headers pass in either direction, and the request id. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final

from aiohttp import hdrs
from multidict import CIMultiDict

from prefixpool import names
from prefixpool_router.paths import Api

_HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# Not for the engine: the pool's credentials, what the HTTP client sets itself, what steers an engine from inside.
_NOT_UP: Final = _HOP_BY_HOP | {
    "authorization",
    "x-api-key",
    "host",
    "content-length",
    "expect",
    names.H_REQUEST_ID,
    names.H_SESSION,
    names.H_POLICY,
    "x-vllm-priority",
    "x-data-parallel-rank",
}
_NOT_UP_READ: Final = _NOT_UP | {"accept-encoding"}  # where the answer's usage is read, it must come as it is
_NOT_DOWN: Final = _HOP_BY_HOP | {
    names.H_REPLICA,
    names.H_REASON,
    names.H_PREDICTED,
    names.H_CACHED,
    names.H_REQUEST_ID,
    names.H_FENCED,
    names.H_BUSY,
}
_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")  # no field value may have these, and aiohttp sends none that has
_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,200}")


def request_id(headers: Mapping[str, str]) -> str:
    """The client's, if it is one printable word of at most 200 characters; else a new one."""
    given = headers.get(names.H_REQUEST_ID)
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return os.urandom(16).hex()


def for_engine(
    headers: Mapping[str, str], *, api: Api, request_id: str, engine_key: str, priority_allowed: bool
) -> CIMultiDict[str]:
    """What an engine gets of a client's headers, and the pool's own. Framing is left to the sender."""
    drop = _NOT_UP if api is Api.OTHER else _NOT_UP_READ
    if priority_allowed:
        drop -= {"x-vllm-priority"}
    if hdrs.CONNECTION in headers:
        drop |= _named_by_connection(headers)
    out: CIMultiDict[str] = CIMultiDict([(k, v) for k, v in headers.items() if k.lower() not in drop])
    out[names.H_REQUEST_ID] = request_id
    if engine_key:
        out[hdrs.AUTHORIZATION] = f"Bearer {engine_key}"
    return out


def for_client(headers: Mapping[str, str], own: Mapping[str, str]) -> CIMultiDict[str]:
    """What a client gets of an engine's headers, and the router's `own`. Fields that are not well-formed are left out."""
    drop = _NOT_DOWN
    if hdrs.CONNECTION in headers:
        drop |= _named_by_connection(headers)
    kept = [(k, v) for k, v in headers.items() if k.lower() not in drop and not _CONTROL.search(v)]
    out: CIMultiDict[str] = CIMultiDict(kept)
    out.update(own)
    out.setdefault(hdrs.SERVER, names.SERVER)  # else aiohttp tells its version
    return out


def _named_by_connection(headers: Mapping[str, str]) -> frozenset[str]:
    lines = (value for name, value in headers.items() if name.lower() == "connection")  # there may be several
    return frozenset(name.strip().lower() for line in lines for name in line.split(","))
