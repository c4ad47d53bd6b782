"""API keys, the scopes they belong to, and the salt that keeps scopes apart. Pure; files are read elsewhere.

Key file, one key a line; empty lines and lines that begin with `#` are ignored:

    <SHA-256 of the key, 64 hex digits> <scope> [allow=<field>,<field>…] [reserve=<seconds>]

Several keys may share a scope. `allow` names internal request fields (request.INTERNAL_FIELDS) that this key may send, and
`policy` for the routing policy header. `reserve`: engines keep the prompts of this key in host memory for so long after each
request, as far as its scope's share goes and they evict by worth (`lru` and `arc` know no promises). vLLM 0.32 hears of it
in chats, completions and messages, not on `/v1/responses`. The key itself is in no file:  printf %s "$KEY" | sha256sum
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Final, NamedTuple

from prefixpool.errors import RequestError, SettingsError
from prefixpool_router.request import INTERNAL_FIELDS

ALLOW_POLICY: Final = "policy"
_MAY_ALLOW: Final = INTERNAL_FIELDS | {ALLOW_POLICY}
_LONGEST_RESERVE_S: Final = 7 * 86400.0
_SALT_LABEL: Final = b"prefixpool cache salt 1"


class Grant(NamedTuple):
    """What a key stands for."""

    scope: str
    allow: frozenset[str] = frozenset()
    reserve_s: float = 0.0  # prompts are kept so long after a request; 0: no longer than others


class KeyRing:
    """All keys of the pool, by hash: the keys themselves are never held. Immutable."""

    def __init__(self, grants: Mapping[bytes, Grant]) -> None:
        self._grants = dict(grants)

    @classmethod
    def parse(cls, text: str) -> KeyRing:
        """Raises SettingsError that names the line and what is wrong, without quoting it."""
        grants: dict[bytes, Grant] = {}
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split()
            if words and not words[0].startswith("#"):
                digest, grant = _parse_line(words, number)
                if digest in grants:
                    raise SettingsError(f"key file, line {number}: this key is listed twice")
                grants[digest] = grant
        return cls(grants)

    def __len__(self) -> int:
        return len(self._grants)

    def check(self, headers: Mapping[str, str]) -> Grant:
        """Raises RequestError 401. The key comes as `Authorization: Bearer` or, as Anthropic's clients do, `x-api-key`.

        Looking up a hash tells nothing by its timing: nobody can choose keys whose hashes share a prefix with a real one's.
        """
        scheme, _, token = headers.get("authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not key:
            raise RequestError(401, "An API key is required: `Authorization: Bearer <key>`.", code="invalid_api_key")
        grant = self._grants.get(hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest())
        if grant is None:
            raise RequestError(401, "This API key is not known.", code="invalid_api_key")
        return grant


def _parse_line(words: list[str], number: int) -> tuple[bytes, Grant]:
    if not 2 <= len(words) <= 4:
        raise SettingsError(
            f"key file, line {number}: expected `sha256 scope [allow=field,…] [reserve=seconds]`, found {len(words)} words"
        )
    try:
        digest = bytes.fromhex(words[0])
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise SettingsError(f"key file, line {number}: the first word is not a SHA-256 in 64 hex digits")
    grant = Grant(words[1])
    for word in words[2:]:
        name, _, value = word.partition("=")
        if name == "allow" and not grant.allow:
            grant = grant._replace(allow=_parse_allow(value, number))
        elif name == "reserve" and not grant.reserve_s:
            grant = grant._replace(reserve_s=_parse_reserve(value, number))
        else:
            raise SettingsError(f"key file, line {number}: behind the scope there may be allow= and reserve=, once each")
    return digest, grant


def _parse_allow(listed: str, number: int) -> frozenset[str]:
    allow = frozenset(listed.split(","))
    if not allow <= _MAY_ALLOW:
        raise SettingsError(f"key file, line {number}: allow= must be any of {', '.join(sorted(_MAY_ALLOW))}")
    return allow


def _parse_reserve(value: str, number: int) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _LONGEST_RESERVE_S:
        raise SettingsError(f"key file, line {number}: reserve= must be seconds, at most {_LONGEST_RESERVE_S:.0f}")
    return seconds


def scope_salt(salt_key: bytes, scope: str, client_salt: str = "") -> str:
    """The engine's `cache_salt` for a scope: 64 hex digits, or "" without a salt key (one scope, no isolation asked for).

    Inputs are length-prefixed, so that no scope and salt of one tenant can be written to equal another's. `client_salt`: of
    a key that may divide its own scope further.
    """
    if not salt_key:
        return client_salt
    parts = (_SALT_LABEL, scope.encode(), client_salt.encode())
    message = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hmac.new(salt_key, message, hashlib.sha256).hexdigest()
