"""Counts of what happened, from several threads."""

from __future__ import annotations

import threading
from collections import Counter


class Tally(Counter[str]):
    """Read it as a dictionary; change it by `add` only, which loses nothing between threads."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def add(self, name: str, count: int = 1) -> None:
        """So many more."""
        with self._lock:
            self[name] += count
