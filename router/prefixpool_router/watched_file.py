"""A file whose parsed contents are kept, and read again when it changes (as mounted Secrets do, by swapping a link)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from prefixpool.errors import SettingsError
from prefixpool.lasting_file import read_lasting

T = TypeVar("T")
_log = logging.getLogger(__name__)


class WatchedFile(Generic[T]):
    """Reads at construction (raises SettingsError); later changes that can't be read leave the last good value in place."""

    def __init__(self, path: str, parse: Callable[[bytes], T]) -> None:
        self._path = Path(path)
        self._parse = parse
        try:
            self._content: bytes | None = read_lasting(self._path)
        except OSError as error:
            raise SettingsError(f"{path}: {error.strerror or error}") from error
        self.value = parse(self._content)

    def refresh(self) -> bool:
        """Look again; True if there is a new value. Blocks for a small read."""
        # The whole content each time, not its modification time: what changes between a look at that and the read is missed.
        content, problem = self._read()
        if content == self._content:
            return False
        self._content = content
        if content is not None:
            try:
                self.value = self._parse(content)
            except SettingsError as error:
                problem = str(error)
        if problem:
            _log.warning("Keeping the last good contents of a file", extra={"file": str(self._path), "cause": problem})
            return False
        _log.info("File was read again", extra={"file": str(self._path)})
        return True

    def _read(self) -> tuple[bytes | None, str]:
        """None, and why, if it cannot be read."""
        try:
            return read_lasting(self._path), ""
        except OSError as error:
            return None, error.strerror or str(error)
