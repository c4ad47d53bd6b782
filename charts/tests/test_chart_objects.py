"""What the chart renders, for every file in ci/: clean, consistent, and in the operator's own words."""

import argparse
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from prefixpool import settings as reading
from prefixpool.api import crd
from prefixpool.api.spec import PoolSpec
from prefixpool.logs import LogFormat
from prefixpool_operator.identity import L_SCRAPE, Component, Identity
from prefixpool_operator.main import checked
from prefixpool_operator.render.network import PORT_NAME, client_service
from prefixpool_operator.settings import PREFIX, OperatorSettings
from prefixpool_testing import chart

Raw = dict[str, Any]

VALUES: dict[str, Raw] = {"defaults": {}, **chart.CI}
EVERY = pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
CLUSTER_WIDE = {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"}


def of_kind(kind: str, values: Raw | None = None) -> list[Raw]:
    return [found for found in chart.objects(values) if found["kind"] == kind]


def one(kind: str, values: Raw | None = None) -> Raw:
    (found,) = of_kind(kind, values)
    return found


def pod(values: Raw | None = None) -> Raw:
    return one("Deployment", values)["spec"]["template"]["spec"]


def operator_settings(values: Raw | None = None) -> OperatorSettings:
    """As the operator itself understands its flags."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    return checked(reading.parse(OperatorSettings, pod(values)["containers"][0]["args"], {}, prefix=PREFIX, parser=parser))


@EVERY
def test_lint_finds_nothing(values: Raw) -> None:
    assert chart.complaints(values) == []


@EVERY
def test_objects_have_labels_a_namespace_and_names_of_their_own(values: Raw) -> None:
    found = [each for each in chart.objects(values) if each["metadata"]["name"] != "trust"]  # of extraObjects
    names = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in found]
    assert len(set(names)) == len(names) > 5
    for kind, namespace, name in names:
        assert (namespace is None) == (kind in CLUSTER_WIDE), name
    for each in found:
        labels = {
            "app.kubernetes.io/name": "prefixpool",
            "app.kubernetes.io/instance": chart.RELEASE,
            "helm.sh/chart": "prefixpool-0.1.0",
        }
        assert labels.items() <= each["metadata"]["labels"].items()


@EVERY
def test_every_selector_finds_the_operators_pods_and_not_the_tests(values: Raw) -> None:
    deployment = one("Deployment", values)
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    (test,) = (each for each in chart.objects(values) if each["kind"] == "Pod")
    for each in chart.objects(values):
        for selector in selectors(each):
            assert selector.items() <= labels.items()
            assert not selector.items() <= test["metadata"]["labels"].items()


def selectors(each: Raw) -> Iterator[Raw]:
    spec = each.get("spec", {})
    match each["kind"]:
        case "Service":
            yield spec["selector"]
        case "NetworkPolicy":
            yield spec["podSelector"]["matchLabels"]
        case "Deployment":
            yield spec["selector"]["matchLabels"]
            yield from (
                spread["labelSelector"]["matchLabels"] for spread in spec["template"]["spec"]["topologySpreadConstraints"]
            )
        case "PodDisruptionBudget" | "ServiceMonitor":
            yield spec["selector"]["matchLabels"]


@EVERY
def test_namespaces_that_scrape_and_the_charts_test_reach_the_operator(values: Raw) -> None:
    spec = one("NetworkPolicy", values)["spec"]
    (rule,) = spec["ingress"]
    scraping, testing = rule["from"]
    assert scraping == {"namespaceSelector": {"matchLabels": {L_SCRAPE: "true"}}}
    (test,) = of_kind("Pod", values)
    assert testing["podSelector"]["matchLabels"].items() <= test["metadata"]["labels"].items()
    assert rule["ports"][0]["port"] in [port["name"] for port in pod(values)["containers"][0]["ports"]]
    assert ("Egress" in spec["policyTypes"]) == ("egress" in spec)


@EVERY
def test_pods_meet_the_restricted_security_profile(values: Raw) -> None:
    (test,) = of_kind("Pod", values)
    for spec in (pod(values), test["spec"]):
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert not context["allowPrivilegeEscalation"]
            assert context["readOnlyRootFilesystem"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()


@EVERY
def test_the_operator_understands_its_flags(values: Raw) -> None:
    assert operator_settings(values).port == pod(values)["containers"][0]["ports"][0]["containerPort"]


def test_flags_say_what_the_values_say() -> None:
    found = operator_settings(
        {
            "watch": {"namespaces": ["a", "b"]},
            "rbac": {"routerRoles": False},
            "image": {"pullPolicy": "Always"},
            "log": {"format": "text"},
        }
    )
    assert (found.namespaces, found.router_rbac, found.image_pull_policy) == (("a", "b"), False, "Always")
    assert (found.host, found.lease_name, found.log_format) == ("::", "prefixpool-operator", LogFormat.TEXT)
    assert operator_settings(chart.CI["ha"]).resync_s == 120


@pytest.mark.parametrize(
    ("image", "registry", "reference"),
    [
        ({}, "", "prefixpool/worker:0.1.0"),
        ({"tag": "1.2"}, "", "prefixpool/worker:1.2"),
        ({"tag": "1.2", "digest": f"sha256:{'a' * 64}"}, "", f"prefixpool/worker@sha256:{'a' * 64}"),
        ({"repository": "mine/worker"}, "registry.example:5000", "registry.example:5000/mine/worker:0.1.0"),
    ],
)
def test_references_of_images(image: Raw, registry: str, reference: str) -> None:
    assert operator_settings({"worker": {"image": image}, "global": {"imageRegistry": registry}}).worker_image == reference


def test_a_registry_that_is_an_ipv6_address_broke_the_deployment() -> None:
    """A plain scalar that begins with a bracket is a list."""
    values: Raw = {"global": {"imageRegistry": "[fd00::1]:5000"}}
    control = "[fd00::1]:5000/prefixpool/control:0.1.0"
    assert {each["spec"]["containers"][0]["image"] for each in of_kind("Pod", values)} == {control}
    assert pod(values)["containers"][0]["image"] == control
    assert operator_settings(values).worker_image == "[fd00::1]:5000/prefixpool/worker:0.1.0"


def test_routers_run_the_operators_image_or_one_of_their_own() -> None:
    assert (
        operator_settings({"image": {"tag": "1.2"}}).router_image == pod({"image": {"tag": "1.2"}})["containers"][0]["image"]
    )
    assert operator_settings({"router": {"image": {"repository": "mine/router"}}}).router_image == "mine/router:0.1.0"


@pytest.mark.parametrize(
    ("values", "release", "name"),
    [
        ({}, "prefixpool", "prefixpool-operator"),
        ({}, "llm", "llm-prefixpool-operator"),
        ({"nameOverride": "pool"}, "llm", "llm-pool-operator"),
        ({"fullnameOverride": "mine"}, "llm", "mine-operator"),
        ({}, "r" * 53, "r" * 45 + "-operator"),
        ({}, "llm.example", "llm-example-prefixpool-operator"),
        ({}, "7", "prefixpool-7-prefixpool-operator"),
        ({}, "7-prefixpool", "prefixpool-7-prefixpool-operator"),
    ],
)
def test_names(values: Raw, release: str, name: str) -> None:
    found = chart.objects(values, release=release)
    assert {each["metadata"]["name"] for each in found if each["kind"] in ("Deployment", "Service", "ServiceAccount")} == {
        name
    }
    assert all(len(each["metadata"]["name"]) <= 63 for each in found)
    (service,) = (each for each in found if each["kind"] == "Service")
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", service["metadata"]["name"]), "else the API server refuses it"


def test_a_release_and_a_namespace_that_are_named_by_numbers() -> None:
    """Helm and Kubernetes allow it; unquoted they were numbers, and the API server refused every object."""
    values: Raw = {"nameOverride": "7", "watch": {"namespaces": ["8"]}, "serviceAccount": {"name": "9"}}
    for found in chart.objects(values, release="1e3", namespace="2026"):
        for name, value in names(found):
            assert isinstance(value, str), (found["kind"], name, value)


def names(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """What must be text: names, namespaces and labels, wherever they stand."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from names(inner, f"{path}.{key}")
    elif path.rpartition(".")[2] in ("name", "namespace", "serviceAccountName") or "abels" in path:
        yield path, value


def test_the_default_and_given_extension_points() -> None:
    values = chart.CI["ha"]
    spec, container = pod(values), pod(values)["containers"][0]
    assert {"name": "TZ", "value": "Etc/UTC"} in container["env"]
    assert (
        [each["name"] for each in spec["volumes"]]
        == [each["name"] for each in container["volumeMounts"]]
        == ["tmp", "trust"]
    )
    assert spec["imagePullSecrets"] == [{"name": "mirror"}]
    assert spec["affinity"] == values["affinity"]
    assert spec["topologySpreadConstraints"] == values["topologySpreadConstraints"]
    template = one("Deployment", values)["spec"]["template"]["metadata"]
    assert values["podLabels"].items() <= template["labels"].items()
    assert values["podAnnotations"].items() <= template["annotations"].items()
    assert one("ConfigMap", values)["metadata"]["namespace"] == chart.NAMESPACE  # extraObjects, its template filled in


def test_an_account_that_withholds_its_token_left_the_operator_without_one() -> None:
    """The `default` ones are commonly hardened so."""
    assert pod({"serviceAccount": {"create": False}})["automountServiceAccountToken"] is True


def test_an_upgrade_of_as_many_operators_as_there_are_nodes_waited_for_one_more_node() -> None:
    """The fourth of three, which an upgrade starts before it ends one, may share a node."""
    assert chart.CI["ha"]["replicas"] == 3
    assert pod(chart.CI["ha"])["affinity"]["podAntiAffinity"].keys() == {"preferredDuringSchedulingIgnoredDuringExecution"}


def test_the_operator_beside_gpus_found_no_node_where_the_control_plane_is_not_a_clusters_own() -> None:
    spec = pod(chart.CI["gpu"])
    assert spec["nodeSelector"] == {"kubernetes.io/os": "linux"}
    (term,) = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert {each["operator"] for each in term["matchExpressions"]} == {"DoesNotExist"}


def test_the_committed_crd_is_copied_byte_for_byte_and_rendered_whole(pytestconfig: pytest.Config) -> None:
    original = (pytestconfig.rootpath / "crds" / crd.FILE).read_bytes()
    assert (chart.FOLDER / "files" / "crds" / crd.FILE).read_bytes() == original, "run `make crds`"
    found = one("CustomResourceDefinition")
    assert found["spec"] == yaml.safe_load(original)["spec"]
    assert crd.SCHEMA_ANNOTATION in found["metadata"]["annotations"]


def test_the_crd_stays_when_the_release_goes_unless_told_otherwise() -> None:
    def policy(values: Raw) -> str | None:
        return one("CustomResourceDefinition", values)["metadata"]["annotations"].get("helm.sh/resource-policy")

    assert policy({}) == "keep"
    assert policy({"crds": {"keep": False}}) is None
    assert of_kind("CustomResourceDefinition", {"crds": {"enabled": False}}) == []


@EVERY
def test_pools_can_be_read_and_outlive_the_release(values: Raw) -> None:
    found = of_kind("InferencePool", values)
    assert len(found) == len(values.get("pools", {}))
    for pool in found:
        PoolSpec.from_object(pool)
        assert pool["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    for pool in of_kind("InferencePool", values | {"keepPools": False}):
        assert "annotations" not in pool["metadata"]


def test_a_pools_metadata_is_its_own() -> None:
    pool = {"namespace": "inference", "labels": {"team": "search"}, "annotations": {"a": "b"}, "spec": {}}
    meta = one("InferencePool", {"pools": {"llama": pool}})["metadata"]
    assert (meta["name"], meta["namespace"], meta["labels"]["team"], meta["annotations"]["a"]) == (
        "llama",
        "inference",
        "search",
        "b",
    )
    assert "app.kubernetes.io/component" not in meta["labels"]


def test_examples_of_routes_lead_to_a_pools_service() -> None:
    identity = Identity(name="llama-8b", namespace="inference", uid="", generation=1)
    service = client_service(identity, Component.WORKER)
    backend = yaml.safe_load((chart.FOLDER / "examples/ingress.yaml").read_text())["spec"]["rules"][0]["http"]["paths"][0][
        "backend"
    ]
    assert backend == {"service": {"name": service["metadata"]["name"], "port": {"name": PORT_NAME}}}
    reference = yaml.safe_load((chart.FOLDER / "examples/httproute.yaml").read_text())["spec"]["rules"][0]["backendRefs"]
    assert reference == [{"name": service["metadata"]["name"], "port": service["spec"]["ports"][0]["port"]}]
