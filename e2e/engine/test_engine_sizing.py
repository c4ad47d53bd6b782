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
from prefixpool_testing.engine_worker import EngineWorker

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

GIB = 1 << 30
MAX_MODEL_LEN = 1024
BLOCK_TOKENS = 32
OPTIONS = (
    *("--device", "cpu", "--enforce-eager", "true", "--block-tokens", str(BLOCK_TOKENS)),
    *("--max-model-len", str(MAX_MODEL_LEN), "--served-model-name", "sized"),
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


def allocated(model: str, kv_bytes: int, *more: str) -> int:
    """Blocks of a real engine, the null block included."""
    with TemporaryDirectory(prefix="pp") as run_dir:
        worker = EngineWorker(Path(run_dir), model, *OPTIONS, "--kv-cache-bytes", str(kv_bytes), *more)
        worker.start()
        try:
            cache = parse_load(worker.get("/metrics").body.decode()).cache
        finally:
            left = worker.stop()
    assert left == []
    assert cache is not None
    return cache.usable_blocks + 1


def planned(model: str, kv_bytes: int) -> int:
    request = SizingRequest(
        shape=shape.parse(folder.config_of(Path(model))),
        accelerator=catalogue.cpu(8 * GIB),
        max_model_len=MAX_MODEL_LEN,
        block_tokens=BLOCK_TOKENS,
        kv_bytes=kv_bytes,
    )
    return plan(request).device_per_replica.blocks


def test_blocks_of_grouped_heads(model: str) -> None:
    assert allocated(model, 123_456_789) == planned(model, 123_456_789) == 123_456_789 // (30 * 2 * 3 * 64 * 2 * 32)


def test_blocks_of_one_shared_head(multi_query: str) -> None:
    blocks = planned(multi_query, 98_765_432)
    assert allocated(multi_query, 98_765_432, "--engine-args=--load-format dummy") == blocks
    assert blocks == 98_765_432 // (7 * 2 * 64 * 2 * 32)
