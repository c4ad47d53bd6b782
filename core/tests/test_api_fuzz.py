"""Whatever stands in an InferencePool, reading it gives a spec or an error in words: never a crash of the operator."""

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from prefixpool.api.crd import root_schema
from prefixpool.api.reading import SpecError
from prefixpool.api.schema import Schema
from prefixpool.api.spec import PoolSpec
from prefixpool.api.status import PoolStatus
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
