"""What each path of the HTTP API is, and which methods it takes. Pure.

A path is judged in its decoded form, because engines decode before they route: `/v1/chat%2Fcompletions` would otherwise be
"something else" here and a chat request there, past every edit. What could be read in two ways is refused.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple
from urllib.parse import unquote

from prefixpool import names
from prefixpool.errors import RequestError


class Api(StrEnum):
    """One word for each API, also the label of the edge's metrics."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    COUNT_TOKENS = "count_tokens"
    EMBEDDINGS = "embeddings"
    MODELS = "models"
    TOKENIZE = "tokenize"
    HEALTH = "health"  # whether to send clients here: answered by the router, not counted
    OTHER = "other"  # anything else under /v1/: passed untouched, by load


class Route(NamedTuple):
    """A known path. `parsed`: its body is a JSON object that the router reads and edits."""

    api: Api
    path: str  # decoded
    parsed: bool


_POST: Final = ("POST", "OPTIONS")
_GET: Final = ("GET", "HEAD", "OPTIONS")
_ANY: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_KNOWN: Final = {
    "/v1/chat/completions": (Api.CHAT, _POST),
    "/v1/completions": (Api.COMPLETIONS, _POST),
    "/v1/responses": (Api.RESPONSES, _POST),
    "/v1/messages": (Api.MESSAGES, _POST),
    "/v1/messages/count_tokens": (Api.COUNT_TOKENS, _POST),
    "/v1/embeddings": (Api.EMBEDDINGS, _POST),
    "/v1/models": (Api.MODELS, _GET),
    "/tokenize": (Api.TOKENIZE, _POST),
    "/detokenize": (Api.TOKENIZE, _POST),
    names.PATH_HEALTH: (Api.HEALTH, _GET),
}
LIGHT: Final = frozenset({"/v1/messages/count_tokens", "/v1/models", "/tokenize", "/detokenize"})  # no work for an engine
_UNPARSED: Final = frozenset({Api.MODELS, Api.TOKENIZE, Api.HEALTH})
_STORED: Final = "/v1/responses/"


def route(raw_path: str, *, engine_store: bool) -> Route:
    """Raises RequestError 404. `raw_path`: as on the wire, without query."""
    path = unquote(raw_path) if "%" in raw_path else raw_path
    known = _KNOWN.get(path)
    if known is not None and path == raw_path:
        return Route(known[0], path, known[0] not in _UNPARSED)
    if not path.startswith("/v1/") or known is not None or _ambiguous(path):
        raise RequestError(404, "No such path.")
    if path.startswith(_STORED) and not engine_store:
        raise RequestError(404, "This pool keeps no stored responses.")
    return Route(Api.OTHER, path, parsed=False)


def allowed_methods(route: Route) -> tuple[str, ...]:
    """For a 405, and for the `Allow` header of OPTIONS."""
    known = _KNOWN.get(route.path)
    return known[1] if known is not None else _ANY


def _ambiguous(path: str) -> bool:
    # A trailing slash makes engines redirect to themselves, which would tell clients an internal address.
    parts = path.split("/")[1:]
    return (
        any(part in ("", ".", "..") for part in parts) or any(ord(c) < 0x20 for c in path) or any(c in path for c in "\\#?")
    )
