"""Temporary folders of clusters. One that a killed process left behind is removed by the next."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prefixpool import private_directory


@contextmanager
def temporary(prefix: str) -> Iterator[Path]:
    """A folder until the end."""
    made = private_directory.make(tempfile.gettempdir(), f"{prefix}-")
    try:
        yield made.path
    finally:
        with suppress(OSError):  # a mount that is still busy, say: what stays goes with the next
            made.remove()
