"""Every rule of the CRD, evaluated by CEL as an API server does, and by `PoolSpec.from_object`: both must agree."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import cel
import pytest

from prefixpool.api.crd import root_schema
from prefixpool.api.reading import SpecError
from prefixpool.api.schema import Schema
from prefixpool.api.spec import PoolSpec

ROOT = root_schema()
FIGURES = {
    "weights": "15Gi", "maxModelLen": 8192, "hiddenSize": 4096, "intermediateSize": 14336, "attentionHeads": 32,
    "vocabularySize": 128256,
}  # fmt: skip
FULL = {"kind": "full", "layers": 32, "heads": 8, "valuesPerToken": 256}
STATE = {"kind": "state", "layers": 3, "stateBytes": "1Mi"}
HOST = {"host": {"memory": "64Gi"}}
SESSIONS = {"sessions": 100, "tokensPerSession": 8000}

# The message's beginning, specs that keep the rule, specs that break it (and no other).
RULES: list[tuple[str, list[dict[str, Any]], list[dict[str, Any]]]] = [
    (
        "code from the Hub runs only at a fixed revision",
        [{"model": {"trustRemoteCode": True, "revision": "abc"}}, {"model": {"trustRemoteCode": False}}],
        [{"model": {"trustRemoteCode": True}}],
    ),
    (
        "with a volume, model.source is a path in it",
        [{"model": {"source": source, "volume": {"claimName": "c"}}} for source in ("/models", "/models/a")],
        [{"model": {"source": source, "volume": {"claimName": "c"}}} for source in ("a/b", "/data/a", "/models-2/a")],
    ),
    (
        "a volume needs no token",
        [{"model": {"tokenSecret": "t"}}],
        [{"model": {"source": "/models/a", "volume": {"claimName": "c"}, "tokenSecret": "t"}}],
    ),
    (
        "a revision is one of a Hub repository",
        [{"model": {"revision": "main"}}, {"model": {"source": "/opt/a"}}],
        [{"model": {"source": "/opt/a", "revision": "main"}}],
    ),
    (
        "layers of kind state need stateBytes",
        [{"model": {"shape": {**FIGURES, "kv": [FULL, STATE]}}}],
        [
            {"model": {"shape": {**FIGURES, "kv": [kv]}}}
            for kv in (
                {"kind": "state", "layers": 1}, {"kind": "latent", "layers": 1}, {**FULL, "stateBytes": 5},
                {**STATE, "valuesPerToken": 5},
            )
        ],
    ),
    (
        "layers of kind window or chunk need window",
        [{"model": {"shape": {**FIGURES, "kv": [{**FULL, "kind": kind, "window": 1024}]}}} for kind in ("window", "chunk")],
        [
            {"model": {"shape": {**FIGURES, "kv": [kv]}}}
            for kv in ({**FULL, "kind": "window"}, {**FULL, "kind": "chunk"}, {**FULL, "window": 5}, {**STATE, "window": 5})
        ],
    ),
    (
        "a variable has value or valueFrom",
        [{"engine": {"env": [{"name": "A", "value": ""}, {"name": "B"}]}}],
        [{"engine": {"env": [{"name": "A", "value": "", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}}],
    ),
    (
        "variables named PREFIXPOOL_… are the operator's",
        [{"engine": {"env": [{"name": "MY_PREFIXPOOL_", "value": "1"}]}}],
        [{"engine": {"env": [{"name": "PREFIXPOOL_RUN_DIR", "value": "1"}]}}],
    ),
    (
        "vLLM takes block sizes that are multiples of 8",
        [{"engine": {"blockSize": 32}}, {"engine": {"blockSize": 5, "kind": "sim"}}],
        [{"engine": {"blockSize": 5}}],
    ),
    (
        "on CPUs, accelerator.memory says",
        [{"accelerator": {"resource": "cpu", "memory": "4Gi"}}],
        [{"accelerator": {"resource": "cpu"}}],
    ),
    (
        "a replica on CPUs is one device",
        [{"accelerator": {"tensorParallel": 8}}],
        [{"accelerator": {"resource": "cpu", "memory": "4Gi", f"{kind}Parallel": 2}} for kind in ("tensor", "pipeline")],
    ),
    (
        "a toleration without key needs operator Exists",
        [{"placement": {"tolerations": [{"operator": "Exists"}, {"key": "a", "value": "b"}]}}],
        [{"placement": {"tolerations": [{"value": "b"}]}}],
    ),
    (
        "a disk is made for each replica",
        [{"kvCache": {**HOST, "disk": {"size": "1Ti", field: "x"}}} for field in ("storageClassName", "sharedClaimName")],
        [{"kvCache": {**HOST, "disk": {"size": "1Ti", "storageClassName": "x", "sharedClaimName": "y"}}}],
    ),
    (
        "blocks pass through host memory on their way to disk",
        [{"kvCache": {**HOST, "disk": {"size": "1Ti"}}}],
        [{"kvCache": {"disk": {"size": "1Ti"}}}],
    ),
    ("eviction is about the host tier", [{"kvCache": {**HOST, "eviction": "arc"}}], [{"kvCache": {"eviction": "lru"}}]),
    (
        "a budget is residentTokens, or sessions",
        [{"kvBudget": {"residentTokens": 5}}, {"kvBudget": SESSIONS}],
        [{"kvBudget": {}}, {"kvBudget": {"residentTokens": 5, **SESSIONS}}],
    ),
    (
        "sessions and tokensPerSession are needed together",
        [{"kvBudget": SESSIONS}],
        [{"kvBudget": {"sessions": 5}}, {"kvBudget": {"tokensPerSession": 5}}],
    ),
    (
        "in Sidecar mode each replica has its router",
        [{"router": {"mode": "Deployment", "replicas": 3}}, {"router": {"mode": "Sidecar"}}],
        [{"router": {"replicas": 3}}],
    ),
    (
        "a budget in the host tier needs one",
        [{"kvBudget": {**SESSIONS, "tier": "host"}, "kvCache": HOST}],
        [{"kvBudget": {**SESSIONS, "tier": "host"}}],
    ),
    (
        "minReplicas and maxReplicas bound what kvBudget asks for",
        [{"kvBudget": SESSIONS, "minReplicas": 1, "maxReplicas": 3}],
        [{"minReplicas": 1}, {"maxReplicas": 1, "replicas": 1}],
    ),
    (
        "minReplicas is above maxReplicas",
        [{"kvBudget": SESSIONS, "minReplicas": 3, "maxReplicas": 3}],
        [{"kvBudget": SESSIONS, "minReplicas": 4, "maxReplicas": 3}],
    ),
    (
        "vLLM on CPUs takes block sizes",
        [
            {"accelerator": {"resource": "cpu", "memory": "4Gi"}, "engine": engine}
            for engine in ({"blockSize": 64}, {"blockSize": 8, "kind": "sim"}, {})
        ],
        [{"accelerator": {"resource": "cpu", "memory": "4Gi"}, "engine": {"blockSize": 16}}],
    ),
    (
        "sessions are longer than the longest sequence",
        [
            {"kvBudget": SESSIONS, "engine": {"maxModelLen": 8000}},
            {"kvBudget": {"residentTokens": 9}, "engine": {"maxModelLen": 8}},
        ],
        [{"kvBudget": SESSIONS, "engine": {"maxModelLen": 7999}}],
    ),
]  # fmt: skip

# The message's beginning, a spec, changes that pass, changes that are refused.
IMMUTABLE: list[tuple[str, dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]] = [
    ("source cannot change", {}, [{"model": {"revision": "v2"}}], [{"model": {"source": "other/model"}}]),
    ("resource cannot change", {}, [{"accelerator": {"memory": "80Gi"}}], [{"accelerator": {"resource": "amd.com/gpu"}}]),
    ("tensorParallel cannot change", {}, [], [{"accelerator": {"tensorParallel": 2}}]),
    ("pipelineParallel cannot change", {}, [], [{"accelerator": {"pipelineParallel": 2}}]),
    *(
        (
            f"{field} cannot change",
            {"kvCache": {**HOST, "disk": {"size": "1Ti", field: "x"}}},
            [{"kvCache": {**HOST, "disk": {"size": "2Ti", field: "x"}}}, {"kvCache": {**HOST, "disk": None}}],
            [{"kvCache": {**HOST, "disk": {"size": "1Ti", field: other}}} for other in ("y", None)],
        )
        for field in ("storageClassName", "sharedClaimName")
    ),
]


def merged(base: Any, change: Any) -> Any:
    """As `kubectl apply` would: None removes a field."""
    if not isinstance(base, dict) or not isinstance(change, dict):
        return deepcopy(change)
    found = {**base, **{key: merged(base.get(key, {}), value) for key, value in change.items()}}
    return {key: value for key, value in found.items() if value is not None}


def pool(change: dict[str, Any], name: str = "llama") -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": merged({"model": {"source": "meta-llama/Llama-3.1-8B"}}, change)}


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
