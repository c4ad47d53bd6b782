"""Whatever stands in an InferencePool, reading it gives a spec or an error in words: never a crash of the operator."""

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from prefixpool.api.crd import root_schema
from prefixpool.api.reading import SpecError
from prefixpool.api.schema import Schema
from prefixpool.api.sizing import budgeted_replicas, known_device, known_shape, sizing_request
from prefixpool.api.spec import PoolSpec
from prefixpool.api.status import PoolStatus
from prefixpool.sizing.errors import SizingError
from prefixpool.sizing.plan import corrected, plan
from prefixpool_testing.pool_rules import merged, pool

ROOT = root_schema()["properties"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)


def near(schema: Schema) -> st.SearchStrategy[Any]:
    """Values with the fields of a schema, each as it should be or anything else."""
    if "properties" in schema:
        fields = {name: near(inner) for name, inner in schema["properties"].items()}
        return st.fixed_dictionaries({}, optional=fields) | JSON
    if "items" in schema:
        return st.lists(near(schema["items"]), max_size=3) | JSON
    if "enum" in schema:
        return st.sampled_from(schema["enum"]) | JSON
    if "anyOf" in schema:
        return st.sampled_from(["64Gi", "12Gx", "0", 5, "500m"]) | JSON
    simple = {"integer": st.integers(-1, 5), "boolean": st.booleans(), "string": st.sampled_from(["", "a", "/models/a"])}
    return simple.get(schema.get("type", ""), JSON) | JSON


def read(obj: Any) -> None:
    try:
        PoolSpec.from_object(obj)
        told = ""
    except SpecError as error:
        told = str(error)
    assert told.startswith(("spec", "metadata.name")) or not told
    assert " - at `" not in told  # a path in the parser's own words


@given(near(ROOT["spec"]))
def test_any_spec(spec: Any) -> None:
    read({"metadata": {"name": "a"}, "spec": spec})


@given(st.fixed_dictionaries({}, optional={name: near(inner) for name, inner in ROOT["spec"]["properties"].items()}))
def test_any_change_of_a_good_pool(change: dict[str, Any]) -> None:
    read(merged(pool({}), {"spec": change}))


@given(JSON)
def test_any_name(name: Any) -> None:
    read({"metadata": {"name": name}, "spec": {"model": {"source": "a/b"}}})


@given(near(ROOT["status"]))
def test_any_status(status: Any) -> None:
    found = PoolStatus.from_object({"status": status})
    assert found is None or msgspec.convert(found.to_object(), PoolStatus) == found


SIZES = st.sampled_from(["1", "5k", "1Mi", "16Gi", "80Gi", "2Ti", "8E"])
SMALL = st.integers(1, 1024) | st.sampled_from([1, 2, 8])
TOKENS = st.integers(1, 100_000_000)


def layers(*kinds: str, **more: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries({"kind": st.sampled_from(kinds), "layers": SMALL, "heads": SMALL, **more})


VALUES = st.integers(1, 1000)
FIGURES = {
    "weights": SIZES,
    "maxModelLen": TOKENS,
    "hiddenSize": st.integers(1, 10**6),
    "intermediateSize": st.integers(1, 10**6),
    "attentionHeads": SMALL,
    "vocabularySize": st.integers(1, 10**7),
    "kv": st.lists(
        layers("full", "latent", valuesPerToken=VALUES)
        | layers("window", "chunk", valuesPerToken=VALUES, window=TOKENS)
        | layers("state", stateBytes=SIZES),
        min_size=1,
        max_size=4,
    ),
}
DEVICES = st.fixed_dictionaries({"memory": SIZES}, optional={"tensorParallel": SMALL, "pipelineParallel": SMALL})
ENGINES = st.fixed_dictionaries({}, optional={"blockSize": st.sampled_from([8, 32, 4096]), "maxNumSeqs": SMALL})
BUDGETS = st.fixed_dictionaries({"residentTokens": TOKENS}) | st.fixed_dictionaries(
    {"sessions": TOKENS, "tokensPerSession": TOKENS}
)


@given(st.fixed_dictionaries(FIGURES), DEVICES, ENGINES, st.none() | BUDGETS)
def test_what_can_be_read_is_planned_within_its_device_or_refused_in_words(
    shape: dict[str, Any], device: dict[str, Any], engine: dict[str, Any], budget: dict[str, Any] | None
) -> None:
    change = {"model": {"shape": shape}, "accelerator": device, "engine": engine, "kvBudget": budget}
    spec = PoolSpec.from_object(pool(change))
    known, there = known_shape(spec.model, spec.engine.kind), known_device(spec.accelerator)
    assert known
    assert there
    request = sizing_request(spec, known.shape, there)
    try:
        planned = plan(request)
    except SizingError:
        return
    assert planned.device_per_replica.bytes <= max(0, planned.memory.room) * spec.accelerator.devices
    assert planned.fits is not bool(planned.short_bytes)
    assert budgeted_replicas(spec, corrected(planned, request, 1000)) >= 1
