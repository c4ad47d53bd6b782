"""The CRD: as committed, structural, bounded; and the errors of structs that could not become one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
import yaml
from msgspec import Meta

from prefixpool.api import crd
from prefixpool.api.schema import Schema, struct_schema
from prefixpool.api.status import ConditionType, PoolStatus
from prefixpool.policy.registry import policies

ROOT = crd.root_schema()


def fields(schema: Schema, path: str) -> Iterator[tuple[str, Schema]]:
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from fields(inner, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from fields(schema[key], f"{path}[]")


FIELDS = [*fields(ROOT["properties"]["spec"], "spec"), *fields(ROOT["properties"]["status"], "status")]


def test_the_committed_crd_is_what_the_code_says(pytestconfig: pytest.Config) -> None:
    committed = Path(pytestconfig.rootpath, "crds", crd.FILE).read_text()
    assert yaml.safe_load(committed) == crd.definition(), "run `make crds`"


def test_the_schema_is_structural() -> None:
    """Type on every node, no references, nothing nullable, and no keyword of JSON Schema that the API server refuses."""
    keywords = {
        "type", "description", "default", "properties", "required", "items", "additionalProperties", "enum", "format",
        "anyOf", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "maxProperties",
    }  # fmt: skip
    for path, schema in FIELDS:
        assert {key for key in schema if not key.startswith("x-kubernetes-")} <= keywords, path
        assert "type" in schema or schema["x-kubernetes-int-or-string"], path


def test_all_that_can_grow_has_a_bound_and_lists_say_how_they_are_merged() -> None:
    for path, schema in FIELDS:
        kind = schema.get("type")
        if kind == "string":
            assert "maxLength" in schema or "enum" in schema, path
        if kind == "array":
            assert "maxItems" in schema, path
            assert schema["x-kubernetes-list-type"] in ("atomic", "map"), path
        if "additionalProperties" in schema:
            assert "maxProperties" in schema, path


def test_every_field_is_described_as_a_sentence() -> None:
    for path, schema in FIELDS:
        if not path.endswith("[]"):
            assert schema["description"].endswith("."), path


def test_objects_whose_fields_have_defaults_are_defaulted_themselves() -> None:
    """Else `kubectl apply` of a pool without `engine` would leave `engine.kind` unset."""
    for name, schema in ROOT["properties"]["spec"]["properties"].items():
        inner = {field: one["default"] for field, one in schema.get("properties", {}).items() if "default" in one}
        if inner:
            assert name in ("model", "kvBudget") or schema["default"] == inner, name


def test_status_has_no_defaults_and_takes_words_of_later_versions() -> None:
    for path, schema in FIELDS:
        if path.startswith("status"):
            assert "default" not in schema, path
            assert "enum" not in schema or path.endswith("conditions[].status"), path


def test_columns_and_scale_paths_name_fields_that_exist() -> None:
    known = {f".{path}" for path, _ in FIELDS} | {".metadata.creationTimestamp"}
    (version,) = crd.definition()["spec"]["versions"]
    paths = [column["jsonPath"] for column in version["additionalPrinterColumns"]]
    for path in [*paths, *version["subresources"]["scale"].values()]:
        if "[?" in path:
            assert any(f'"{kind}"' in path for kind in ConditionType), path
        else:
            assert path in known, path


def test_the_policies_are_those_of_the_router() -> None:
    assert ROOT["properties"]["spec"]["properties"]["router"]["properties"]["policy"]["enum"] == list(policies())


def test_the_status_schema_has_every_field_of_the_struct() -> None:
    names = {field.encode_name for field in msgspec.structs.fields(PoolStatus)}
    assert set(ROOT["properties"]["status"]["properties"]) == names


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (int, "has no description"),
        (Annotated[str, Meta(description="A text.")], "no max_length"),
        (Annotated[tuple[int, ...], Meta(description="A list.")], "no max_length"),
        (Annotated[dict[str, int], Meta(description="A map.")], "no max_length"),
    ],
)
def test_a_field_without_description_or_bound_cannot_become_a_schema(kind: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        struct_schema(msgspec.defstruct("Odd", [("odd", kind)]))
