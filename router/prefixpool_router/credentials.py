"""The secrets of one router, each from a file that is read again when it changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from prefixpool import engine_key
from prefixpool.errors import SettingsError
from prefixpool_router.auth import Grant, KeyRing, scope_salt
from prefixpool_router.settings import RouterSettings
from prefixpool_router.watched_file import WatchedFile

_ANYBODY: Final = Grant("")


class Credentials:
    """Raises SettingsError if a named file is unreadable, or if scopes were asked for without the means to separate them."""

    def __init__(self, settings: RouterSettings) -> None:
        if settings.keys_file and not settings.salt_key_file:
            raise SettingsError("--keys-file needs --salt-key-file: without a salt key, scopes could not be kept apart")
        self._keys = WatchedFile(settings.keys_file, _key_ring) if settings.keys_file else None
        self._salt_key = WatchedFile(settings.salt_key_file, _secret) if settings.salt_key_file else None
        self._engine_key = WatchedFile(settings.engine_key_file, engine_key.sent) if settings.engine_key_file else None

    def refresh(self) -> None:
        """Look at the files; blocks for a few stat calls."""
        for file in (self._keys, self._salt_key, self._engine_key):
            if file is not None:
                file.refresh()

    @property
    def engine_key(self) -> str:
        """Bearer for engines and agents; "" = none is sent."""
        return self._engine_key.value if self._engine_key is not None else ""

    @property
    def salted(self) -> bool:
        """Requests carry the salt of their scope."""
        return self._salt_key is not None

    def check(self, headers: Mapping[str, str]) -> Grant:
        """Whose request this is. Raises RequestError 401; without a key file everybody is in one scope."""
        return self._keys.value.check(headers) if self._keys is not None else _ANYBODY

    def salt(self, grant: Grant, client_salt: object) -> str:
        """The `cache_salt` to send; "" = none. `client_salt`: from the body, heeded only where the key allows it."""
        own = client_salt if isinstance(client_salt, str) and "cache_salt" in grant.allow else ""
        return scope_salt(self._salt_key.value if self._salt_key is not None else b"", grant.scope, own)


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SettingsError("not a text file in UTF-8") from error


def _key_ring(raw: bytes) -> KeyRing:
    return KeyRing.parse(_decoded(raw))


def _secret(raw: bytes) -> bytes:
    secret = raw.strip()
    if len(secret) < 16:
        raise SettingsError("a salt key has at least 16 bytes")
    return secret
