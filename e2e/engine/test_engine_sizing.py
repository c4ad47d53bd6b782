"""The plan against running engines: for so many bytes of KV, vLLM allocates exactly the blocks that were planned."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from prefixpool.sizing import catalogue, shape
from prefixpool.sizing.plan import plan
from prefixpool.sizing.request import SizingRequest
from prefixpool_agent.engines.metrics import parse_load
from prefixpool_agent.inspection import folder
from prefixpool_testing.engine_worker import DEVICE_BLOCKS, KV_BYTES, MAX_MODEL_LEN, EngineWorker

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

GIB = 1 << 30
SHORT_MODEL_LEN = 1024
BLOCK_TOKENS = 32
OPTIONS = (
    *("--device", "cpu", "--enforce-eager", "true", "--block-tokens", str(BLOCK_TOKENS)),
    *("--max-model-len", str(SHORT_MODEL_LEN), "--served-model-name", "sized", "--engine-args=--load-format dummy"),
)


@pytest.fixture
def multi_query(model: str, tmp_path: Path) -> str:
    """A model whose heads share one KV head. Its weights are made up by the engine; the tokenizer is borrowed."""
    for file in Path(model).glob("*token*"):
        shutil.copy(file, tmp_path)
    config: dict[str, Any] = json.loads(Path(model, "config.json").read_text())
    config |= {
        "num_hidden_layers": 7,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "hidden_size": 512,
        "head_dim": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def allocated(engine: EngineWorker) -> int:
    """Blocks of a real engine, the null block included."""
    cache = parse_load(engine.get("/metrics").body.decode()).cache
    assert cache is not None
    return cache.usable_blocks + 1


def planned(model: str, kv_bytes: int, max_model_len: int) -> int:
    request = SizingRequest(
        shape=shape.parse(folder.config_of(Path(model))),
        accelerator=catalogue.cpu(8 * GIB),
        max_model_len=max_model_len,
        block_tokens=BLOCK_TOKENS,
        kv_bytes=kv_bytes,
    )
    return plan(request).device_per_replica.blocks


def test_blocks_of_grouped_heads(engine_worker: EngineWorker, model: str) -> None:
    """The engine of the contract is given bytes, not blocks."""
    blocks = planned(model, KV_BYTES, MAX_MODEL_LEN)
    assert allocated(engine_worker) == blocks == DEVICE_BLOCKS == KV_BYTES // (30 * 2 * 3 * 64 * 2 * 32)


def test_blocks_of_one_shared_head(multi_query: str) -> None:
    kv_bytes = 98_765_432
    with TemporaryDirectory(prefix="pp") as run_dir:
        worker = EngineWorker(Path(run_dir), multi_query, *OPTIONS, "--kv-cache-bytes", str(kv_bytes))
        worker.start()
        try:
            found = allocated(worker)
        finally:
            left = worker.stop()
    assert left == []
    assert found == planned(multi_query, kv_bytes, SHORT_MODEL_LEN) == kv_bytes // (7 * 2 * 64 * 2 * 32)
