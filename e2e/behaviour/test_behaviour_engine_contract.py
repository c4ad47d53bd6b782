"""The sim engine keeps the contract of engines that real vLLM keeps (e2e/engine/test_engine_contract.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from prefixpool_testing.engine_contract import AnswerContract, BlockContract, LimitContract, TierContract
from prefixpool_testing.engine_contract.asks import MODEL
from prefixpool_testing.engine_worker import OPTIONS, EngineWorker, KvListener, listening
from prefixpool_testing.spill_engine import SpillEngine, spill_engine

SIM = ("--engine", "sim", "--engine-args", "--time-scale 0.2")


@pytest.fixture(scope="module")
def engine_worker() -> Iterator[EngineWorker]:
    with TemporaryDirectory(prefix="pp") as folder:
        worker = EngineWorker(Path(folder), MODEL, *OPTIONS, *SIM)
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


@pytest.fixture(scope="module")
def tiered_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpillEngine]:
    disk = ("--disk-kv-dir", str(tmp_path_factory.mktemp("kv")), "--disk-kv-bytes", str(1 << 30))
    with spill_engine(MODEL, *SIM, "--host-kv-bytes", str(1 << 27), *disk) as engine:
        yield engine


class TestSimAnswers(AnswerContract):
    """One by one."""


class TestSimBlocks(BlockContract):
    """KV events."""


class TestSimLimits(LimitContract):
    """Load and leaving."""


class TestSimTiers(TierContract):
    """Below the device."""
