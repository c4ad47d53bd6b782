"""Reading InferencePools: typed, with errors that name the field."""

import re
from typing import Any

import pytest

from prefixpool.api.engine import EngineKind
from prefixpool.api.quantity import Amount, Bytes
from prefixpool.api.reading import SpecError
from prefixpool.api.schema import struct_schema
from prefixpool.api.spec import _INSTEAD, _REFUSED, PoolSpec
from prefixpool.api.status import Condition, ConditionStatus, ConditionType, PoolStatus, Reason
from prefixpool.sizing.kv import KvDtype


def read(**spec: Any) -> PoolSpec:
    model = {"source": "meta-llama/Llama-3.1-8B-Instruct"}
    return PoolSpec.from_object({"metadata": {"name": "llama"}, "spec": {"model": model, **spec}})


def test_the_least_pool_has_every_default() -> None:
    spec = read()
    assert spec.model.name == "Llama-3.1-8B-Instruct"
    assert spec.engine.kind is EngineKind.VLLM
    assert (spec.accelerator.resource, spec.accelerator.devices) == ("nvidia.com/gpu", 1)
    assert spec.kv_cache.dtype is KvDtype.AUTO
    assert (spec.replicas, spec.kv_budget, spec.kv_cache.host) == (None, None, None)
    assert (spec.rollout.max_unavailable, spec.drain.timeout_seconds, spec.paused) == (1, 60, False)


def test_quantities_of_memory_are_bytes_and_those_of_pods_stay_as_written() -> None:
    spec = read(
        kvCache={"host": {"memory": "1.5Gi"}, "disk": {"size": 10**12}},
        engine={"resources": {"requests": {"cpu": "500m", "memory": 4096}}},
    )
    assert spec.kv_cache.host
    assert spec.kv_cache.disk
    assert spec.engine.resources
    assert spec.kv_cache.host.memory == 3 << 29
    assert spec.kv_cache.disk.size == 10**12
    assert spec.engine.resources.requests == {"cpu": "500m", "memory": "4096"}


@pytest.mark.parametrize(
    ("written", "size"),
    [("64Gi", 64 << 30), ("1k", 1000), ("0.5Ki", 512), ("1.1", 2), ("8E", 8 * 10**18), (7, 7), ("1Pi", 1 << 50)],
)
def test_quantities_of_bytes(written: str | int, size: int) -> None:
    assert Bytes.parse(written) == size


@pytest.mark.parametrize(
    "written", ["12Gx", "", "-1", "Gi", "1 Gi", "1e3", "500m", "1" * 33, "16Ei", "0", 0, "0Gi", True, None, 1.5, -1, "1\n"]
)
def test_what_is_no_quantity_of_bytes(written: Any) -> None:
    with pytest.raises(ValueError, match=r"write e\.g\. 64Gi"):
        Bytes.parse(written)


def test_what_is_no_quantity_at_all() -> None:
    assert Amount.parse("500m") == "500m"
    with pytest.raises(ValueError, match=r"write e.g. 64Gi, 2 or 500m"):
        Amount.parse("many")


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({"kvCache": {"host": {"memory": "12Gx"}}}, 'spec.kvCache.host.memory: "12Gx" is not a quantity; write e.g. 64Gi'),
        ({"replica": 3}, "spec.replica: no such field; there are model, engine,"),
        ({"engine": {"env": [{"name": "A"}, {}]}}, "spec.engine.env[1].name: missing, but needed"),
        ({"engine": {"env": [{"name": "A", "vale": "x"}]}}, "spec.engine.env[0].vale: no such field; there are name"),
        ({"engine": {"kind": "vlm"}}, "spec.engine.kind: 'vlm' is none of vllm, sim"),
        ({"model": {}}, "spec.model.source: missing, but needed"),
        ({"model": {"source": ""}}, "spec.model.source: expected `str` of length >= 1"),
        ({"replicas": "3"}, "spec.replicas: expected `int`, got `str`"),
        ({"replicas": -1}, "spec.replicas: expected `int` >= 0"),
        ({"placement": {"nodeSelector": {"": "x"}}}, "spec.placement.nodeSelector: expected `str` of length >= 1"),
        ({"router": {"limits": {"maxBody": "5k"}}}, "spec.router.limits: maxBody is too small for any request"),
        ({"router": {"limits": {"queueTimeoutSeconds": 0}}}, "spec.router.limits.queueTimeoutSeconds: expected `int` >= 1"),
        ({"kvCache": {"disk": {"size": "1Ti"}}}, "spec.kvCache: blocks pass through host memory"),
        ({"engine": {"resources": {"limits": {"cpu": "x"}}}}, 'spec.engine.resources.limits[...]: "x" is not a quantity'),
        ({"engine": {"extraArgs": ["--port=1"]}}, "spec.engine.extraArgs: engine argument --port is refused: the worker"),
        (
            {"engine": {"kind": "sim", "extraArgs": ["--middleware", "x"]}},
            "spec.engine.extraArgs: engine argument --middleware is refused: the gate is the one middleware",
        ),
    ],
)  # fmt: skip
def test_errors_begin_with_the_field_and_say_what_would_be_right(spec: dict[str, Any], told: str) -> None:
    with pytest.raises(SpecError) as refused:
        read(**spec)
    assert str(refused.value).startswith(told)


@pytest.mark.parametrize("kind", EngineKind)
def test_refused_engine_arguments_are_told_in_fields_of_a_pool_and_not_in_settings_of_a_worker(kind: EngineKind) -> None:
    for flag, reason in {**_REFUSED[kind].long, **_REFUSED[kind].short}.items():
        assert "from its setting" not in reason, flag
    with pytest.raises(SpecError, match=r"--max-model-len is refused: set spec.engine.maxModelLen"):
        read(engine={"kind": kind.value, "extraArgs": ["--max-model-len=1"]})


def test_every_field_that_stands_for_an_engine_argument_is_there() -> None:
    schema = struct_schema(PoolSpec)
    for path in {path for told in _INSTEAD.values() for path in re.findall(r"spec\.([\w.]+)", told)}:
        found = schema
        for name in path.split("."):
            found = found["properties"][name]


@pytest.mark.parametrize("spec", [None, [], "x", 5])
def test_a_spec_that_is_none(spec: Any) -> None:
    with pytest.raises(SpecError, match=r"^spec: expected `object`"):
        PoolSpec.from_object({"metadata": {"name": "a"}, "spec": spec})


def test_an_object_without_a_name() -> None:
    with pytest.raises(SpecError, match=r"^metadata.name: '' cannot name pods"):
        PoolSpec.from_object({"spec": {}})


CONDITION = Condition(
    type=ConditionType.AVAILABLE, status=ConditionStatus.TRUE, reason=Reason.REPLICAS_READY, message="2 of 2 are ready",
    last_transition_time="2026-11-30T12:00:00Z", observed_generation=3,
)  # fmt: skip


def test_a_status_comes_back_as_it_was_written_and_leaves_out_what_is_not_known() -> None:
    status = PoolStatus(
        observed_generation=3, conditions=(CONDITION,), replicas=0, ready_replicas=0, updated_replicas=0, selector="a=b"
    )
    written = status.to_object()
    assert written["replicas"] == 0
    assert "endpoint" not in written
    assert PoolStatus.from_object({"status": written}) == status
    assert status.condition(ConditionType.AVAILABLE) == CONDITION
    assert status.condition(ConditionType.SIZED) is None


@pytest.mark.parametrize("status", [None, {}, {"observedGeneration": 1, "conditions": [{"type": "OfALaterVersion"}]}])
def test_a_status_that_is_not_there_or_not_understood(status: Any) -> None:
    assert PoolStatus.from_object({"status": status}) is None
