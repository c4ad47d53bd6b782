"""The CRD on a real API server: accepted, defaulted, pruned, explained, scaled; examples; another kind of the same name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from prefixpool.api.status import Condition, ConditionStatus, ConditionType, PoolStatus, Reason, SizingStatus, TierStatus
from prefixpool.sizing.plan import LimitedBy, Source
from prefixpool_testing.cluster.api_server import ApiServer
from prefixpool_testing.cluster.errors import ClusterError
from prefixpool_testing.gateway_pool import GATEWAY_CRD
from prefixpool_testing.pool_rules import merged, pool

FULL = "inferencepools.prefixpool.dev"


@pytest.fixture(scope="module", autouse=True)
def crd(api: ApiServer, pytestconfig: pytest.Config) -> None:
    api.kubectl("apply", "--server-side", "-f", str(Path(pytestconfig.rootpath, "crds")))
    api.until_established(FULL)


def applied(api: ApiServer, namespace: str, spec: dict[str, Any], name: str = "llama") -> dict[str, Any]:
    api.apply(merged(pool(spec, name), {"metadata": {"namespace": namespace}}))
    found: dict[str, Any] = api.get(f"{FULL}/{name}", "-n", namespace)
    return found


def test_the_schema_is_structural_and_its_names_are_accepted(api: ApiServer) -> None:
    conditions = {one["type"]: one["status"] for one in api.get("crd", FULL)["status"]["conditions"]}
    assert conditions == {"NamesAccepted": "True", "Established": "True"}  # NonStructuralSchema would stand here


def test_the_least_pool_is_defaulted(api: ApiServer, namespace: str) -> None:
    spec = applied(api, namespace, {})["spec"]
    assert spec["engine"] == {"kind": "vllm"}
    assert spec["accelerator"] == {"resource": "nvidia.com/gpu", "tensorParallel": 1, "pipelineParallel": 1}
    assert spec["kvCache"] == {"dtype": "auto"}
    assert spec["router"] == {"mode": "Sidecar", "policy": "prefix", "accessLog": False}
    assert "replicas" not in spec


def test_a_part_that_is_given_keeps_the_defaults_of_the_rest(api: ApiServer, namespace: str) -> None:
    spec = applied(api, namespace, {"accelerator": {"memory": "80Gi"}, "kvBudget": {"residentTokens": 1000}})["spec"]
    assert spec["accelerator"] == {
        "resource": "nvidia.com/gpu", "memory": "80Gi", "tensorParallel": 1, "pipelineParallel": 1,
    }  # fmt: skip
    assert spec["kvBudget"]["tier"] == "device"


def test_unknown_fields_are_named_or_pruned(api: ApiServer, namespace: str) -> None:
    odd = yaml.safe_dump(pool({"engine": {"imagee": "x"}}))
    told = api.kubectl("create", "-n", namespace, "-f", "-", stdin=odd, check=False)
    assert 'unknown field "spec.engine.imagee"' in told
    api.kubectl("create", "--validate=ignore", "-n", namespace, "-f", "-", stdin=odd)
    assert api.get(f"{FULL}/llama", "-n", namespace)["spec"]["engine"] == {"kind": "vllm"}


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"kvCache": {"host": {"memory": "12Gx"}}}, "spec.kvCache.host.memory"),
        ({"kvCache": {"dtype": "int3"}}, "spec.kvCache.dtype"),
        ({"engine": {"env": [{"name": "A"}, {"name": "A"}]}}, "spec.engine.env[1]"),
        ({"replicas": -1}, "spec.replicas"),
        ({"model": {"source": ""}}, "spec.model.source"),
    ],
)
def test_values_out_of_bounds_are_refused_at_their_field(
    api: ApiServer, namespace: str, spec: dict[str, Any], field: str
) -> None:
    told = api.kubectl("create", "-n", namespace, "-f", "-", stdin=yaml.safe_dump(pool(spec)), check=False)
    assert f"{field}: " in told


def test_affinity_is_kept_as_it_is(api: ApiServer, namespace: str) -> None:
    term = {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h100"]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}
    assert applied(api, namespace, {"placement": {"affinity": affinity}})["spec"]["placement"]["affinity"] == affinity


def a_status() -> PoolStatus:
    """With every field."""
    conditions = tuple(
        Condition(
            type=kind, status=ConditionStatus.TRUE, reason=Reason.REPLICAS_READY, message="2 of 2 are ready",
            last_transition_time="2026-11-30T12:00:00Z", observed_generation=1,
        )
        for kind in ConditionType
    )  # fmt: skip
    tier = TierStatus(bytes=1 << 40, blocks=1000, tokens=16_000)
    sizing = SizingStatus(
        weights_bytes=16 << 30, kv_bytes_per_token=131_072, device_per_replica=tier, host_per_replica=tier,
        disk_per_replica=tier, concurrent_sequences=3, max_model_len=8192, sessions_per_replica=4, replicas=2,
        limited_by=LimitedBy.DEVICE_KV, source=Source.MEASURED,
    )  # fmt: skip
    return PoolStatus(
        observed_generation=1, conditions=conditions, replicas=2, ready_replicas=2, updated_replicas=2,
        selector="prefixpool.dev/pool=llama", endpoint="http://llama.default.svc", replicas_managed_by="prefixpool-operator",
        shape_source="Catalogue", sizing=sizing,
    )  # fmt: skip


def write_status(api: ApiServer, namespace: str, status: PoolStatus) -> None:
    whole = {"apiVersion": "prefixpool.dev/v1alpha1", "kind": "InferencePool", "metadata": {"name": "llama"}}
    text = yaml.safe_dump({**whole, "status": status.to_object()})
    api.kubectl("apply", "--server-side", "--subresource=status", "-n", namespace, "-f", "-", stdin=text)


def test_no_field_of_a_status_is_pruned_and_columns_show_it(api: ApiServer, namespace: str) -> None:
    applied(api, namespace, {"replicas": 2})
    write_status(api, namespace, a_status())
    assert PoolStatus.from_object(api.get(f"{FULL}/llama", "-n", namespace)) == a_status()
    head, row = api.kubectl("get", "ppool", "-n", namespace).splitlines()
    assert head.split() == ["NAME", "MODEL", "REPLICAS", "READY", "AVAILABLE", "REASON", "AGE"]
    assert row.split()[:6] == ["llama", "meta-llama/Llama-3.1-8B", "2", "2", "True", "ReplicasReady"]
    assert "131072" in api.kubectl("get", "ppool", "-n", namespace, "-o", "wide")


def test_scale_sets_replicas_and_reads_the_selector(api: ApiServer, namespace: str) -> None:
    applied(api, namespace, {"replicas": 2})
    write_status(api, namespace, a_status())
    api.kubectl("scale", f"{FULL}/llama", "--replicas=5", "-n", namespace)
    path = f"/apis/prefixpool.dev/v1alpha1/namespaces/{namespace}/inferencepools/llama/scale"
    scale = yaml.safe_load(api.kubectl("get", "--raw", path))
    assert (scale["spec"]["replicas"], scale["status"]) == (5, {"replicas": 2, "selector": "prefixpool.dev/pool=llama"})


def test_two_managers_of_replicas_are_told_of_each_other(api: ApiServer, namespace: str) -> None:
    applied(api, namespace, {"replicas": 2})
    mine = yaml.safe_dump({**pool({}), "spec": {"replicas": 3}})
    flags = ("apply", "--server-side", "--field-manager=prefixpool-operator", "-n", namespace, "-f", "-")
    with pytest.raises(ClusterError, match=r'conflict with "kubectl".*\.spec\.replicas'):
        api.kubectl(*flags, stdin=mine)


def test_lists_merge_by_name_under_server_side_apply(api: ApiServer, namespace: str) -> None:
    applied(api, namespace, {"engine": {"env": [{"name": "A", "value": "1"}]}})
    more = yaml.safe_dump({**pool({}), "spec": {"engine": {"env": [{"name": "B", "value": "2"}]}}})
    api.kubectl("apply", "--server-side", "--field-manager=another", "-n", namespace, "-f", "-", stdin=more)
    env = api.get(f"{FULL}/llama", "-n", namespace)["spec"]["engine"]["env"]
    assert {one["name"] for one in env} == {"A", "B"}


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("spec", "model <Object> -required- What is served, and from where."),
        ("spec.kvCache.host.memory", "Host memory for KV of each replica"),
        ("spec.engine.kind", "ENUM: vllm sim"),
        ("status.conditions", "Accepted, Sized, Available, Progressing, Degraded."),
    ],
)
def test_explain_reads_well(api: ApiServer, path: str, words: str) -> None:
    told = api.kubectl("explain", f"{FULL}.{path}")
    assert words in " ".join(told.split())


def test_the_examples_are_accepted(api: ApiServer, namespace: str, pytestconfig: pytest.Config) -> None:
    folder = Path(pytestconfig.rootpath, "examples")
    api.kubectl("apply", "--server-side", "-n", namespace, "-f", str(folder))
    names = {yaml.safe_load(file.read_text())["metadata"]["name"] for file in folder.glob("*.yaml")}
    assert {one["metadata"]["name"] for one in api.get(FULL, "-n", namespace)["items"]} == names


def test_another_kind_of_the_same_name_does_no_harm(api: ApiServer, namespace: str) -> None:
    api.apply(GATEWAY_CRD)
    try:
        api.until_established(GATEWAY_CRD["metadata"]["name"])
        assert applied(api, namespace, {})["apiVersion"] == "prefixpool.dev/v1alpha1"
        assert "llama" in api.kubectl("get", "ppool", "-n", namespace)
        assert "What is served" in api.kubectl("explain", f"{FULL}.spec.model")
    finally:
        api.kubectl("delete", "crd", GATEWAY_CRD["metadata"]["name"])
