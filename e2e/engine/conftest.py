"""Real vLLM: one worker for all tests of a session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from prefixpool_testing.engine_worker import KV_BYTES, OPTIONS, EngineWorker, KvListener, listening


@pytest.fixture(scope="session")
def model() -> str:
    """Folder of the model. A missing one fails loudly: `make test-engine` makes it."""
    folder = os.environ.get("MODEL", "")
    assert Path(folder, "config.json").is_file(), f"MODEL={folder!r} is not the folder of a model: use `make test-engine`"
    return folder


@pytest.fixture(scope="session")
def engine_worker(model: str) -> Iterator[EngineWorker]:
    """Starts once, and must leave nothing behind at the end. It is given bytes where others are given blocks."""
    by_bytes = ("--device-blocks", "0", "--kv-cache-bytes", str(KV_BYTES))
    with TemporaryDirectory(prefix="pp") as folder:
        worker = EngineWorker(Path(folder), model, *OPTIONS, *by_bytes)
        worker.start()
        try:
            yield worker
        finally:
            left = worker.stop()
        assert left == []


@pytest.fixture(scope="session")
def kv_events(engine_worker: EngineWorker) -> Iterator[KvListener]:
    """Hears all KV events of the session."""
    with listening(engine_worker.run_dir) as events:
        yield events
