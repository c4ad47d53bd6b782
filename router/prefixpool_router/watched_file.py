"""A file whose parsed contents are kept, and read again when it changes (as mounted Secrets do, by swapping a link)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from prefixpool.errors import SettingsError

T = TypeVar("T")
_log = logging.getLogger(__name__)

_Stamp = tuple[int, int, int]


class WatchedFile(Generic[T]):
    """Reads at construction (raises SettingsError); later changes that can't be read leave the last good value in place."""

    def __init__(self, path: str, parse: Callable[[bytes], T]) -> None:
        self._path = Path(path)
        self._parse = parse
        try:
            self._stamp: _Stamp | None = self._look()
            self.value = parse(self._path.read_bytes())
        except OSError as error:
            raise SettingsError(f"{path}: {error.strerror or error}") from error

    def refresh(self) -> bool:
        """Read again if the file changed; True if there is a new value. Blocks for a stat and, rarely, a small read."""
        try:
            stamp = self._look()
        except OSError:
            stamp = None
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self.value = self._parse(self._path.read_bytes())
        except (OSError, SettingsError) as error:
            _log.warning("Keeping the last good contents of a file", extra={"file": str(self._path), "cause": str(error)})
            return False
        _log.info("File was read again", extra={"file": str(self._path)})
        return True

    def _look(self) -> _Stamp:
        stat = self._path.stat()
        return stat.st_mtime_ns, stat.st_ino, stat.st_size
