"""Temporary folders of clusters. One that a killed process left behind is removed by the next."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from prefixpool_testing.cluster import cache

_OWNER: Final = "owner"


@contextmanager
def temporary(prefix: str) -> Iterator[Path]:
    """A folder until the end. Who owns one holds the lock of its file, which the kernel frees when he dies."""
    with cache.locked(Path(tempfile.gettempdir(), f"{prefix}.lock")):
        for left in Path(tempfile.gettempdir()).glob(f"{prefix}-*"):
            if (stale := cache.owned(left / _OWNER)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                stale.close()
        folder = Path(tempfile.mkdtemp(prefix=f"{prefix}-"))
        owner = cache.owned(folder / _OWNER)
    assert owner is not None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        owner.close()
