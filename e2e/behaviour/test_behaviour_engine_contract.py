"""The sim engine keeps the contract of engines that real vLLM keeps (e2e/engine/test_engine_contract.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from prefixpool_testing.engine_contract import AnswerContract, BlockContract, LimitContract
from prefixpool_testing.engine_contract.asks import MODEL
from prefixpool_testing.engine_worker import OPTIONS, EngineWorker, KvListener, listening


@pytest.fixture(scope="module")
def engine_worker() -> Iterator[EngineWorker]:
    with TemporaryDirectory(prefix="pp") as folder:
        worker = EngineWorker(Path(folder), MODEL, *OPTIONS, "--engine", "sim", "--engine-args", "--time-scale 0.2")
        worker.start()
        try:
            yield worker
        finally:
            left = worker.stop()
        assert left == []


@pytest.fixture(scope="module")
def kv_events(engine_worker: EngineWorker) -> Iterator[KvListener]:
    with listening(engine_worker.run_dir) as events:
        yield events


class TestSimAnswers(AnswerContract):
    """One by one."""


class TestSimBlocks(BlockContract):
    """KV events."""


class TestSimLimits(LimitContract):
    """Load and leaving."""
