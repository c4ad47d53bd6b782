"""Every rule of the CRD, evaluated by CEL as an API server does, and by `PoolSpec.from_object`: both must agree."""

from collections.abc import Iterator
from typing import Any

import cel
import pytest

from prefixpool.api.crd import root_schema
from prefixpool.api.reading import SpecError
from prefixpool.api.schema import Schema
from prefixpool.api.spec import PoolSpec
from prefixpool_testing.pool_rules import IMMUTABLE, RULES, merged, pool

ROOT = root_schema()


def defaulted(schema: Schema, value: Any) -> Any:
    """As an API server does before it looks at rules."""
    if isinstance(value, list) and "items" in schema:
        return [defaulted(schema["items"], one) for one in value]
    if not isinstance(value, dict) or "properties" not in schema:
        return value
    filled = {name: one["default"] for name, one in schema["properties"].items() if "default" in one} | value
    return {key: defaulted(schema["properties"].get(key, {}), one) for key, one in filled.items()}


def validations(schema: Schema) -> Iterator[Schema]:
    yield from schema.get("x-kubernetes-validations", [])
    for inner in (*schema.get("properties", {}).values(), *filter(None, [schema.get("items")])):
        yield from validations(inner)


def broken(schema: Schema, value: Any, old: Any = None) -> Iterator[str]:
    """Messages of all rules that do not hold, innermost last."""
    for rule in schema.get("x-kubernetes-validations", []):
        if "oldSelf" in rule["rule"] and old is None:
            continue
        if cel.evaluate(rule["rule"], {"self": value, "oldSelf": old}) is not True:
            yield rule["message"]
    if isinstance(value, list):
        for one in value:
            yield from broken(schema["items"], one)
    if isinstance(value, dict):
        for key, inner in schema.get("properties", {}).items():
            if key in value:
                yield from broken(inner, value[key], (old or {}).get(key))


def told_by_cel(obj: dict[str, Any]) -> list[str]:
    return list(broken(ROOT, defaulted(ROOT, obj)))


def cases(which: int) -> Iterator[Any]:
    for rule in RULES:
        for index, spec in enumerate(rule[which]):  # type: ignore[arg-type]  # 1 and 2 are lists of specs
            yield pytest.param(rule[0], spec, id=f"{rule[0]}-{index}")


@pytest.mark.parametrize(("message", "spec"), [*cases(2)])
def test_what_breaks_a_rule_is_refused_with_its_message_alone(message: str, spec: dict[str, Any]) -> None:
    (told,) = told_by_cel(pool(spec))
    assert told.startswith(message)
    with pytest.raises(SpecError) as refused:
        PoolSpec.from_object(pool(spec))
    assert str(refused.value).endswith(told)


@pytest.mark.parametrize(("message", "spec"), [*cases(1)])
def test_what_keeps_the_rules_passes(message: str, spec: dict[str, Any]) -> None:
    assert told_by_cel(pool(spec)) == []
    PoolSpec.from_object(pool(spec))


@pytest.mark.parametrize(
    ("message", "before", "good", "bad"), IMMUTABLE, ids=lambda one: one if isinstance(one, str) else ""
)
def test_what_cannot_change_in_a_living_pool(
    message: str, before: dict[str, Any], good: list[dict[str, Any]], bad: list[dict[str, Any]]
) -> None:
    old = defaulted(ROOT, pool(before))
    for change in ({}, *good):
        assert list(broken(ROOT, defaulted(ROOT, merged(old, {"spec": change})), old)) == []
    for change in bad:
        (told,) = broken(ROOT, defaulted(ROOT, merged(old, {"spec": change})), old)
        assert told.startswith(message)
        assert "create a new InferencePool" in told


@pytest.mark.parametrize("name", ["a" * 41, "Llama", "a.b", "1a", "a-"])
def test_names_that_children_could_not_bear_are_refused(name: str) -> None:
    (told,) = told_by_cel(pool({}, name))
    assert "at most 40 lower-case letters" in told
    with pytest.raises(SpecError, match="at most 40 lower-case letters"):
        PoolSpec.from_object(pool({}, name))


@pytest.mark.parametrize("name", ["a", "llama-3", "a" * 40])
def test_names_that_children_can_bear(name: str) -> None:
    assert told_by_cel(pool({}, name)) == []
    PoolSpec.from_object(pool({}, name))


def test_the_tables_have_every_rule() -> None:
    tables = [*(message for message, *_ in RULES), *(message for message, *_ in IMMUTABLE), "this name cannot name pods"]
    declared = [rule["message"] for rule in validations(ROOT)]
    assert len(declared) == len(tables)
    for message in declared:
        assert sum(message.startswith(beginning) for beginning in tables) == 1, message
