"""The pool's engine key: read from a file, compared in constant time, re-read when the file changes."""

from __future__ import annotations

import hmac
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from prefixpool import engine_key
from prefixpool.errors import SettingsError

_RECHECK_S: Final = 1.0
_log = logging.getLogger(__name__)


class KeyFile:
    """One key a line; each is accepted, so that keys can be rotated while senders still differ."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises SettingsError if there is no key to begin with."""
        self._path = path
        self._clock = clock
        self._checked = clock()
        self._stamp = _stamp(path)
        self._keys = _read(path)
        if not self._keys:
            raise SettingsError(f"{path}: no engine key in it")

    def accepts(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """True for exactly one `Authorization: Bearer` header with a key."""
        token = _bearer(headers)
        if self._clock() - self._checked >= _RECHECK_S:
            self._refresh()
        if token is None:
            return False
        if self._matches(token):
            return True
        return self._refresh() and self._matches(token)  # a sender may know the new key before we looked

    def _matches(self, token: bytes) -> bool:
        found = False
        for key in self._keys:
            found |= hmac.compare_digest(key, token)
        return found

    def _refresh(self) -> bool:
        """Read the file again if it changed; True if it did. A missing or empty file leaves the known keys valid."""
        self._checked = self._clock()
        try:
            stamp = _stamp(self._path)
            if stamp == self._stamp:
                return False
            keys = _read(self._path)
        except SettingsError as error:
            _log.warning("engine key file unreadable, keeping the known keys: %s", error)
            return False
        if not keys:
            return False
        self._stamp, self._keys = stamp, keys
        return True


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        status = os.stat(path)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from error
    return status.st_ino, status.st_mtime_ns, status.st_size


def _read(path: Path) -> tuple[bytes, ...]:
    return engine_key.accepted(engine_key.read(path))


def _bearer(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    values = [value for name, value in headers if name == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, token = values[0].partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None
