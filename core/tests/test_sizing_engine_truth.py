"""Sizing against what vLLM itself says: fixtures made by scripts/make_kv_fixtures.py, and figures of running engines."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixpool.sizing import catalogue, kv, shape
from prefixpool.sizing.kv import KvDtype
from prefixpool.sizing.shape import KvLayers, LayerKind

GIB = 1 << 30
FIXTURES = json.loads((Path(__file__).parent / "kv_fixtures.json").read_text())


def cases() -> Iterator[Any]:
    for model in FIXTURES["models"]:
        for index, case in enumerate(model["cases"]):
            yield pytest.param(model, case, id=f"{model['name']}-{index}-{case['kv_dtype']}")


@pytest.mark.parametrize(("model", "case"), list(cases()))
def test_blocks_groups_and_tokens_are_what_vllm_plans(model: dict[str, Any], case: dict[str, Any]) -> None:
    told = case["vllm"]
    laid = kv.layout(shape.parse(model["config"]), KvDtype(case["kv_dtype"]), case["block_tokens"])
    blocks = laid.blocks(case["kv_bytes"])
    assert blocks == told["blocks"]
    assert laid.tokens(blocks, case["max_model_len"], told["max_in_flight_tokens"]) == told["tokens"]
    assert [(group.layers, group.block_tokens) for group in laid.groups] == [
        (group["layers"], group["block_tokens"]) for group in told["groups"]
    ]
    assert {group["page_bytes"] for group in told["groups"]} == {laid.page_bytes}


@pytest.mark.parametrize("model", FIXTURES["models"], ids=lambda model: model["name"])
def test_parameters_and_weight_bytes_are_those_of_the_module_that_vllm_builds(model: dict[str, Any]) -> None:
    found = shape.parse(model["config"])
    told = model["cases"][0]["vllm"]
    assert found.parameters.total == told["parameters"]
    # DeepSeek V3 keeps the biases that balance its experts in 32 bits: 30 kB of 1.3 TB.
    assert found.weight_bytes == pytest.approx(told["weight_bytes"], rel=1e-7)


def test_the_fixtures_cover_every_kind_of_attention() -> None:
    kinds = " ".join(model["kind"] for model in FIXTURES["models"])
    for kind in ("MHA", "GQA", "MQA", "MLA", "sliding window", "chunks", "linear attention", "MoE", "tied"):
        assert kind in kinds
    assert len(FIXTURES["models"]) >= 17
    assert any(case["kv_dtype"] == "fp8" for model in FIXTURES["models"] for case in model["cases"])


# What prototypes measured on real vLLM: model, bytes, dtype, block size -> blocks.
@pytest.mark.parametrize(
    ("name", "gib", "dtype", "block_tokens", "blocks"),
    [
        ("llama-3.1-8b", 40, KvDtype.AUTO, 16, 20_480),
        ("llama-3.1-8b", 40, KvDtype.FP8, 16, 40_960),
        ("gemma-3-4b", 20, KvDtype.AUTO, 32, 32_768),
        ("smollm2-135m", 1, KvDtype.AUTO, 32, 1456),  # logged by a running server, vLLM 0.32 on CPU
    ],
)
def test_blocks_of_measured_engines(name: str, gib: int, dtype: KvDtype, block_tokens: int, blocks: int) -> None:
    assert kv.layout(catalogue.model(name), dtype, block_tokens).blocks(gib * GIB) == blocks


def test_llama_8b_on_40_gib_holds_327_680_tokens() -> None:
    laid = kv.layout(catalogue.model("llama-3.1-8b"))
    assert laid.tokens(laid.blocks(40 * GIB), 8192) == 327_680


def test_gemma_3_has_seven_groups_and_320_328_tokens_on_20_gib() -> None:
    laid = kv.layout(catalogue.model("gemma-3-4b"), KvDtype.AUTO, 32)
    assert len(laid.groups) == 7
    assert laid.tokens(laid.blocks(20 * GIB), 8192, in_flight=2048) == 320_328


def test_a_small_model_on_one_gib_has_the_1820_blocks_that_the_engine_logged() -> None:
    """12 layers of 49,152 bytes for 32 tokens; the server said 58,240 tokens, 7.11 sequences of 8,192."""
    small = shape.parse(
        {
            "model_type": "llama",
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": 6,
            "head_dim": 64,
            "intermediate_size": 2048,
            "vocab_size": 32000,
        }
    )
    laid = kv.layout(small, KvDtype.AUTO, 32)
    assert laid.page_bytes == 49_152
    assert laid.blocks(GIB) == 1820
    assert laid.tokens(1820, 8192) == 58_240


def test_deepseek_v2_lite_has_pages_of_18_432_bytes() -> None:
    latent = KvLayers(kind=LayerKind.LATENT, count=27, values=576)
    model = catalogue.model("deepseek-v3")
    lite = kv.layout(shape.ModelShape(**{**_fields(model), "kv": (latent,), "layers": 27}))
    assert lite.page_bytes == 18_432
    assert lite.blocks(20 * GIB) == 43_151


def _fields(model: shape.ModelShape) -> dict[str, Any]:
    return {name: getattr(model, name) for name in model.__struct_fields__}


# research/algorithms.md 4: total parameters, KV bytes per token in 16 bits.
@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes"),
    [
        ("llama-3.1-8b", 8_030_261_248, 131_072),
        ("llama-3.1-70b", 70_553_706_496, 327_680),
        ("llama-3.1-405b", 405_853_388_800, 516_096),
        ("qwen2.5-7b", 7_615_616_512, 57_344),
        ("qwen3-32b", 32_762_123_264, 262_144),
        ("qwen3-30b-a3b", 30_532_122_624, 98_304),
        ("qwen3-235b-a22b", 235_093_634_560, 192_512),
        ("qwen3-coder-480b", 480_154_875_392, 253_952),
        ("mixtral-8x7b", 46_702_792_704, 131_072),
        ("gemma-3-27b", 27_009_346_304, 81_920),
        ("phi-4", 14_659_507_200, 204_800),
        ("qwen3-next-80b-a3b", 79_674_391_296, 24_576),
        ("llama-4-scout", 107_769_861_120, 49_152),
        ("deepseek-v3", 671_026_419_200, 70_272),
        ("gpt-oss-20b", 20_914_757_184, 24_576),
        ("gpt-oss-120b", 116_829_156_672, 36_864),
    ],
)
def test_published_parameters_and_kv_bytes(name: str, parameters: int, kv_bytes: int) -> None:
    model = catalogue.model(name)
    assert model.parameters.total == parameters
    assert kv.bytes_per_token(model, KvDtype.AUTO) == kv_bytes
    assert kv.bytes_per_token(model, KvDtype.FP8) == kv_bytes // 2


@pytest.mark.parametrize(
    ("name", "gib"), [("gpt-oss-20b", 12.8), ("gpt-oss-120b", 60.8), ("deepseek-v3", 627.5), ("llama-3.1-8b", 14.96)]
)
def test_weights_as_stored(name: str, gib: float) -> None:
    assert catalogue.model(name).weight_bytes / GIB == pytest.approx(gib, rel=0.005)
