"""From a pool's spec to a plan: where shapes and devices come from, and that no setting is lost on the way."""

from typing import Any

import msgspec
import pytest

from prefixpool.api.engine import EngineKind
from prefixpool.api.sizing import (
    NO_SHAPE,
    KnownShape,
    ShapeSource,
    budgeted_replicas,
    known_device,
    known_shape,
    sizing_request,
)
from prefixpool.api.spec import PoolSpec
from prefixpool.sizing import catalogue
from prefixpool.sizing.errors import ShapeError, SizingError
from prefixpool.sizing.inspection import Inspection
from prefixpool.sizing.kv import KvDtype
from prefixpool.sizing.plan import SizingPlan, plan
from prefixpool.sizing.request import Budget, BudgetTier, SizingRequest
from prefixpool.sizing.shape import LayerKind

GIB = 1 << 30
LLAMA_CONFIG = dict(catalogue.CONFIGS["llama-3.1-8b"])
BY_HAND = {
    "weights": "16060522496", "maxModelLen": 131072, "hiddenSize": 4096, "intermediateSize": 14336, "attentionHeads": 32,
    "vocabularySize": 128256, "kv": [{"kind": "full", "layers": 32, "heads": 8, "valuesPerToken": 256}],
}  # fmt: skip


def read(**spec: Any) -> PoolSpec:
    return PoolSpec.from_object({"metadata": {"name": "p"}, "spec": {"model": {"source": "a/llama-3.1-8b"}, **spec}})


def shape_of(spec: PoolSpec, inspected: Inspection | None = None) -> KnownShape:
    found = known_shape(spec.model, spec.engine.kind, inspected)
    assert found
    return found


def request_of(product: str = "NVIDIA-H100-80GB-HBM3", memory: int = 80 * GIB, **spec: Any) -> SizingRequest:
    pool = read(**spec)
    device = known_device(pool.accelerator, product, memory)
    assert device
    return sizing_request(pool, shape_of(pool).shape, device)


def plan_of(**spec: Any) -> SizingPlan:
    return plan(request_of(**spec))


def test_figures_by_hand_win_over_the_catalogue_and_both_over_an_inspection() -> None:
    inspected = Inspection(config=LLAMA_CONFIG)
    assert shape_of(read(model={"source": "a/llama-3.1-8b", "shape": BY_HAND}), inspected).source is ShapeSource.SPEC
    assert shape_of(read(), inspected).source is ShapeSource.CATALOGUE
    assert shape_of(read(model={"source": "a/my-model"}), inspected).source is ShapeSource.INSPECTION


def test_with_none_of_the_three_nothing_is_guessed_and_the_words_name_them_all() -> None:
    assert known_shape(read(model={"source": "a/my-model"}).model, EngineKind.VLLM) is None
    for source in ("spec.model.shape", "catalogue", "inspection"):
        assert source in NO_SHAPE


def test_the_name_of_a_folder_is_not_believed_but_by_the_sim() -> None:
    model = read(model={"source": "/models/llama-3.1-8b", "volume": {"claimName": "c"}}).model
    assert known_shape(model, EngineKind.VLLM) is None
    assert known_shape(model, EngineKind.SIM) is not None


def test_figures_by_hand_give_the_same_plan_as_the_catalogue() -> None:
    by_hand = plan_of(model={"source": "a/b", "shape": BY_HAND})
    listed = plan_of()
    assert by_hand.device_per_replica == listed.device_per_replica
    assert (by_hand.weights_bytes, by_hand.kv_bytes_per_token) == (listed.weights_bytes, listed.kv_bytes_per_token)


def test_windows_and_states_by_hand() -> None:
    kv = [
        {"kind": "window", "layers": 3, "heads": 4, "valuesPerToken": 128, "window": 512},
        {"kind": "state", "layers": 3, "stateBytes": "1Mi"},
        {"kind": "latent", "layers": 3, "valuesPerToken": 576},
    ]
    found = shape_of(read(model={"source": "a/b", "shape": {**BY_HAND, "kv": kv}})).shape
    assert [(one.kind, one.window, one.state_bytes) for one in found.kv] == [
        (LayerKind.WINDOW, 512, 0),
        (LayerKind.STATE, 0, 1 << 20),
        (LayerKind.LATENT, 0, 0),
    ]


def test_an_inspection_of_nonsense_is_told_as_such() -> None:
    with pytest.raises(ShapeError, match="hidden_size"):
        known_shape(read(model={"source": "a/my-model"}).model, EngineKind.VLLM, Inspection(config={"model_type": "llama"}))


def test_memory_of_the_spec_wins_over_what_nodes_say_and_neither_is_guessed() -> None:
    assert known_device(read(accelerator={"memory": "24Gi"}).accelerator, "NVIDIA-L4", 22 * GIB) == known_device(
        read().accelerator, "NVIDIA-L4", 24 * GIB
    )
    assert known_device(read().accelerator, "NVIDIA-L4") is None


@pytest.mark.parametrize(
    ("product", "name"),
    [("NVIDIA-A100-SXM4-80GB", "a100-80"), ("NVIDIA L4", "l4"), ("NVIDIA-H100-80GB-HBM3", "h100"), ("NVIDIA-H200", "h200")],
)
def test_products_of_nodes_are_devices_of_the_catalogue(product: str, name: str) -> None:
    known = catalogue.accelerator(name)
    found = known_device(read().accelerator, product, known.memory - 12345)
    assert found
    assert (found.name, found.memory, found.bandwidth) == (name, known.memory - 12345, known.bandwidth)


def test_an_unknown_device_needs_no_more_than_its_memory() -> None:
    assert plan(request_of("ACME-Tensor-9", 80 * GIB)).fits


def test_every_setting_reaches_the_plan() -> None:
    asked = request_of(
        accelerator={"tensorParallel": 2, "pipelineParallel": 2},
        engine={"maxModelLen": 8192, "blockSize": 32, "maxNumSeqs": 64, "extraArgs": ["--max-num-batched-tokens=4096"]},
        kvCache={
            "dtype": "fp8",
            "memoryUtilizationPercent": 85,
            "host": {"memory": "64Gi"},
            "disk": {"size": "1Ti"},
        },
        kvBudget={"sessions": 100, "tokensPerSession": 8000, "tier": "host"},
    )
    assert (asked.parallel.tensor, asked.parallel.pipeline) == (2, 2)
    assert (asked.max_model_len, asked.block_tokens, asked.batches.sequences, asked.batches.tokens) == (8192, 32, 64, 4096)
    assert (asked.kv_dtype, asked.utilisation_percent) == (KvDtype.FP8, 85)
    assert (asked.host_bytes, asked.disk_bytes) == (64 * GIB, 1 << 40)
    assert asked.budget == Budget(sessions=100, tokens_per_session=8000, tier=BudgetTier.HOST)


@pytest.mark.parametrize(
    ("args", "tokens"),
    [(["--max-num-batched-tokens", "512"], 512), (["--max-num-batched-tokens=512", "--max-num-batched-tokens=256"], 256),
     (["--max-num-batched-tokens"], 8192), (["--other", "512"], 8192),
     (["--max_num_batched_tokens=512"], 512), (["--max-num-batched-tokens", "32k"], 32_000),
     (["--max-num-batched-tokens=16K"], 16_384), (["--max-num-batched-tokens=1.5k"], 1500),
     (["--max-num-batched-tokens=much"], 8192)],
)  # fmt: skip
def test_batched_tokens_among_the_extra_arguments(args: list[str], tokens: int) -> None:
    assert request_of(engine={"extraArgs": args}).batches.tokens == tokens


@pytest.mark.parametrize(
    ("spec", "tokens"),
    [({}, 16), ({"accelerator": {"resource": "cpu", "memory": "64Gi"}}, 32), ({"engine": {"kind": "sim"}}, 32)],
)
def test_blocks_are_as_large_as_the_worker_asks_for(spec: dict[str, Any], tokens: int) -> None:
    assert request_of(**spec).block_tokens == tokens


def test_on_cpus_the_memory_is_the_whole_pods_and_the_host_tier_comes_on_top() -> None:
    cpu = {"resource": "cpu", "memory": "4Gi"}
    model = {"source": "HuggingFaceTB/SmolLM2-135M-Instruct"}
    alone = plan_of(model=model, accelerator=cpu)
    assert alone.fits
    assert alone.host_needs.memory == 4 * GIB
    assert alone.memory.weights + alone.memory.overhead + alone.device_per_replica.bytes <= 4 * GIB
    tiered = plan_of(model=model, accelerator=cpu, kvCache={"host": {"memory": "10Gi"}})
    assert tiered.host_needs.memory == 16 * GIB
    assert tiered.host_needs.shared_memory == 13 * GIB
    disk = plan_of(model=model, accelerator=cpu, kvCache={"host": {"memory": "10Gi"}, "disk": {"size": "100Gi"}})
    assert disk.host_needs.memory == 16 * GIB + disk.disk_per_replica.blocks * 1600


def test_what_is_asked_and_planned_can_be_written_as_json() -> None:
    cache = {"host": {"memory": "64Gi"}, "disk": {"size": "1Ti"}}
    asked = request_of(model={"source": "a/b", "shape": BY_HAND}, accelerator={"memory": "80Gi"}, kvCache=cache)
    assert msgspec.json.decode(msgspec.json.encode(asked), type=SizingRequest) == asked
    assert msgspec.json.decode(msgspec.json.encode(plan(asked)), type=SizingPlan) == plan(asked)


def test_settings_that_contradict_the_model_are_refused_by_the_plan() -> None:
    with pytest.raises(SizingError, match="131,072 tokens at most"):
        plan(request_of(engine={"maxModelLen": 200_000}))


@pytest.mark.parametrize(
    ("bounds", "replicas"), [({}, 23), ({"maxReplicas": 5}, 5), ({"minReplicas": 30}, 30), ({"minReplicas": 1}, 23)]
)
def test_a_budget_stays_within_its_bounds(bounds: dict[str, int], replicas: int) -> None:
    spec = {"kvBudget": {"sessions": 250, "tokensPerSession": 40_000}, **bounds}
    found = plan(request_of(memory=catalogue.accelerator("h100").memory, **spec))
    assert budgeted_replicas(read(**spec), found) == replicas


def test_without_a_budget_there_is_one_replica() -> None:
    assert budgeted_replicas(read(), plan_of()) == 1
