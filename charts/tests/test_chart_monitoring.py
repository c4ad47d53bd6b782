"""Monitors look where the metrics are, and every metric that rules and dashboard name exists, with the labels they use."""

import json
import re
from typing import Any

import pytest
import yaml

from prefixpool.api.sizing import known_device, known_shape, sizing_request
from prefixpool.api.spec import PoolSpec
from prefixpool.sizing.plan import plan
from prefixpool_operator.identity import L_POOL, Identity
from prefixpool_operator.observed import Settings
from prefixpool_operator.render.blueprint import Blueprint
from prefixpool_operator.render.pods import worker_template
from prefixpool_testing import chart

Raw = dict[str, Any]

ALL = {
    "monitoring": {
        part: {"enabled": True, "labels": {"who": "me"}} for part in ("serviceMonitor", "podMonitor", "rules", "dashboard")
    }
}
OF_TARGETS = {"namespace", "pool", "pod", "service", "le"}
NAME = r"prefixpool_[a-z0-9_]+"
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}

RULES: list[Raw] = [
    rule for group in yaml.safe_load((chart.FOLDER / "files/rules.yaml").read_text())["groups"] for rule in group["rules"]
]
PANELS: list[Raw] = json.loads((chart.FOLDER / "files/dashboard.json").read_text())["panels"]
DRAWN = [target["expr"] for panel in PANELS for target in panel.get("targets", ())]
QUERIES = [rule["expr"] for rule in RULES] + DRAWN


@pytest.fixture(scope="module")
def metrics(pytestconfig: pytest.Config) -> dict[str, set[str]]:
    """Name on the wire → labels, from the reference page."""
    page = (pytestconfig.rootpath / "docs/reference/metrics.md").read_text()
    rows = re.findall(rf"^\| `({NAME})` \| (\w+) \| (.*?) \|", page, re.MULTILINE)
    return {name + suffix: set(re.findall(r"`(\w+)`", labels)) for name, kind, labels in rows for suffix in SUFFIXES[kind]}


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_asks_for_metrics_and_labels_that_exist(query: str, metrics: dict[str, set[str]]) -> None:
    names = re.findall(NAME, query)
    assert names
    assert set(names) <= metrics.keys()
    assert grouping(query) <= set.union(OF_TARGETS, *(metrics[name] for name in names))
    for name, matchers in re.findall(rf"({NAME})\{{([^}}]*)\}}", query):
        assert set(re.findall(r"(\w+)!?=", matchers)) <= metrics[name] | OF_TARGETS


def grouping(query: str) -> set[str]:
    """Labels that are left in its answer."""
    return {label.strip() for labels in re.findall(r"by \(([^)]*)\)", query) for label in labels.split(",")}


def test_what_an_alert_says_is_there_to_be_said(metrics: dict[str, set[str]]) -> None:
    for rule in RULES:
        for said in rule.get("annotations", {}).values():
            assert set(re.findall(r"\$labels\.(\w+)", said)) <= grouping(rule["expr"]), rule["alert"]
            for name in re.findall(NAME, said):
                assert name in metrics, rule["alert"]


def test_nothing_is_monitored_unless_asked_for() -> None:
    assert not [
        each["kind"] for each in chart.objects() if "monitoring" in each["apiVersion"] or each["kind"] == "ConfigMap"
    ]


def test_all_of_it() -> None:
    found = {each["kind"]: each for each in chart.objects(ALL) if each["metadata"]["labels"].get("who") == "me"}
    assert found.keys() == {"ServiceMonitor", "PodMonitor", "PrometheusRule", "ConfigMap"}
    assert [rule for group in found["PrometheusRule"]["spec"]["groups"] for rule in group["rules"]] == RULES
    assert json.loads(found["ConfigMap"]["data"]["prefixpool.json"])["panels"] == PANELS
    assert found["PodMonitor"]["spec"]["namespaceSelector"] == {"any": True}


def test_monitors_look_at_ports_that_pods_and_service_have() -> None:
    found = {each["kind"]: each for each in chart.objects(ALL)}
    (endpoint,) = found["ServiceMonitor"]["spec"]["endpoints"]
    assert endpoint["port"] in [port["name"] for port in found["Service"]["spec"]["ports"]]
    spec = found["PodMonitor"]["spec"]
    assert spec["selector"]["matchExpressions"] == [{"key": L_POOL, "operator": "Exists"}]
    assert {endpoint["port"] for endpoint in spec["podMetricsEndpoints"]} <= pool_ports()
    meta = re.sub(r"[./-]", "_", L_POOL)
    for endpoint in spec["podMetricsEndpoints"]:
        assert endpoint["relabelings"] == [{"sourceLabels": [f"__meta_kubernetes_pod_label_{meta}"], "targetLabel": "pool"}]


def pool_ports() -> set[str]:
    """Names of the ports of a pool's pods, as the operator renders them."""
    pool = yaml.safe_load((chart.FOLDER.parents[1] / "examples/sim.yaml").read_text())
    spec = PoolSpec.from_object(pool)
    shape, device = known_shape(spec.model, spec.engine.kind), known_device(spec.accelerator)
    assert shape
    assert device
    identity = Identity(name="sim", namespace="default", uid="", generation=1)
    settings = Settings(worker_image="worker", router_image="router", operator_namespace="")
    sizing = plan(sizing_request(spec, shape.shape, device))
    found = worker_template(Blueprint(identity=identity, spec=spec, sizing=sizing, settings=settings))["spec"]
    return {port["name"] for container in found["containers"] + found["initContainers"] for port in container["ports"]}


def test_pods_are_sought_where_pools_are() -> None:
    values = {"watch": {"namespaces": ["team-a"]}, "monitoring": {"podMonitor": {"enabled": True}}}
    (found,) = (each for each in chart.objects(values) if each["kind"] == "PodMonitor")
    assert found["spec"]["namespaceSelector"] == {"matchNames": ["team-a"]}


def test_the_dashboard_has_panels_of_its_own() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS) > 10
    places = [tuple(panel["gridPos"].values()) for panel in PANELS]
    assert len(set(places)) == len(places)


def test_panels_lie_beside_one_another() -> None:
    cells = [(x, y) for place in (panel["gridPos"] for panel in PANELS) for x, y in cells_of(**place)]
    assert len(set(cells)) == len(cells)


def cells_of(x: int, y: int, w: int, h: int) -> list[tuple[int, int]]:
    """That a panel covers."""
    return [(x + i, y + j) for i in range(w) for j in range(h)]


@pytest.mark.parametrize(
    "metric", ["cached_tokens", "fill_ratio", "stores", "loads", "evictions", "failures", "reservations"]
)
def test_the_dashboard_draws_what_agents_tell_of_tiers(metric: str, metrics: dict[str, set[str]]) -> None:
    (name,) = (name for name in metrics if re.fullmatch(rf"prefixpool_agent_tier_{metric}(_total)?", name))
    (query,) = (query for query in DRAWN if name in query)
    assert grouping(query) == metrics[name], "every label has its line"
