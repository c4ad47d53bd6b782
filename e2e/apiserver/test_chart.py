"""The chart on a real API server: objects are accepted, rights are enforced, and pools outlive releases."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import helm_python
import pytest

from prefixpool_testing import chart
from prefixpool_testing.cluster.api_server import ApiServer, api_server
from prefixpool_testing.cluster.kubectl import RESTRICTED

Raw = dict[str, Any]

ACCOUNT = f"system:serviceaccount:{chart.NAMESPACE}:prefixpool-operator"
NAMESPACES = (chart.NAMESPACE, "team-a", "team-a-staging", "inference")
POOLS = "inferencepools.prefixpool.dev"
POOL = {
    "apiVersion": "prefixpool.dev/v1alpha1",
    "kind": "InferencePool",
    "metadata": {"name": "mine", "namespace": "default"},
    "spec": chart.CI["small"]["pools"]["sim"]["spec"],
}


class Release:
    """As `helm install prefixpool charts/prefixpool` does, and so on. Nothing can run, so nothing is waited for."""

    def __init__(self, config: helm_python.Config) -> None:
        self._config = config

    def install(self, values: Raw | None = None) -> None:
        self._config.install(chart.FOLDER, chart.RELEASE, values or {})

    def upgrade(self, values: Raw | None = None) -> None:
        self._config.upgrade(chart.FOLDER, chart.RELEASE, values or {}, reset_values=True)

    def uninstall(self) -> str:
        """What it says."""
        return str(self._config.uninstall(chart.RELEASE, ignore_not_found=True).get("info"))


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    """One of its own: on the others' the CustomResourceDefinition is not Helm's."""
    with api_server() as api:
        api.make_namespaces(*NAMESPACES, labels=RESTRICTED)
        yield api


@pytest.fixture
def release(server: ApiServer) -> Iterator[Release]:
    with releases(server.kubeconfig, chart.NAMESPACE) as found:
        yield found


@contextmanager
def releases(kubeconfig: Path, namespace: str) -> Iterator[Release]:
    with helm_python.Config(kubeconfig_path=kubeconfig, namespace=namespace) as config:
        found = Release(config)
        try:
            yield found
        finally:
            found.uninstall()


def uid(api: ApiServer, name: str, namespace: str = "default") -> str:
    return str(api.get(POOLS, name, "-n", namespace)["metadata"]["uid"])


@pytest.mark.parametrize("values", chart.CI.values(), ids=chart.CI)
def test_the_server_accepts_every_object(values: Raw, server: ApiServer, release: Release) -> None:
    """But those for the Prometheus operator, which it does not know. The namespace enforces *restricted* for pods."""
    release.install({"watch": {"namespaces": ["default"]}})  # for the kind and the ServiceAccount that others need
    known = [obj for obj in chart.objects(values) if not obj["apiVersion"].startswith("monitoring.coreos.com/")]
    pods = [{**obj["spec"]["template"], "apiVersion": "v1", "kind": "Pod"} for obj in known if obj["kind"] == "Deployment"]
    for pod in pods:
        pod["metadata"] |= {"name": "operator-pod", "namespace": chart.NAMESPACE}
    assert len(pods) == 1
    for obj in [*known, *pods]:
        dry(server, obj)


def dry(server: ApiServer, obj: Raw) -> None:
    """Whether it would be taken. Raises ClusterError with what the server says."""
    arguments = ("apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "-f", "-")
    server.kubectl(*arguments, stdin=json.dumps(obj))


@pytest.mark.parametrize("name", ["7", "llm.example", "r" * 53])
def test_a_release_named_by_a_number_or_with_dots_failed_at_its_service(name: str, server: ApiServer) -> None:
    """After half of it was there."""
    for obj in chart.objects(release=name):
        dry(server, obj)


def test_pools_outlive_the_release_and_the_next_one_takes_them_over(server: ApiServer, release: Release) -> None:
    release.install()
    server.until_established(POOLS)
    server.apply(POOL)
    before = uid(server, "mine")
    release.upgrade(chart.CI["small"])
    of_the_release = uid(server, "sim", chart.NAMESPACE)
    assert f"[CustomResourceDefinition] {POOLS}" in (said := release.uninstall())
    assert "[InferencePool] sim" in said
    release.install()
    release.upgrade(chart.CI["small"])
    assert (uid(server, "mine"), uid(server, "sim", chart.NAMESPACE)) == (before, of_the_release)
    release.upgrade()
    assert uid(server, "sim", chart.NAMESPACE) == of_the_release


def test_pools_in_the_first_install_say_what_is_missing(server: ApiServer, release: Release) -> None:
    server.kubectl("delete", "crd", POOLS, "--ignore-not-found")
    with pytest.raises(helm_python.HelmReleaseError, match="ensure CRDs are installed first"):
        release.install(chart.CI["small"])


def test_a_release_that_keeps_nothing_takes_all_pools_with_it(server: ApiServer, release: Release) -> None:
    release.install({"crds": {"keep": False}})
    server.until_established(POOLS)
    server.apply(POOL)
    assert "InferencePool" not in release.uninstall()
    server.kubectl("wait", "--for=delete", f"crd/{POOLS}", "--timeout=30s")


RIGHTS = {
    ("patch", POOLS, "team-a"): True,
    ("create", "statefulsets.apps", "team-a-staging"): True,
    ("get", "secrets", "team-a"): True,
    ("list", "secrets", "team-a"): False,
    ("delete", POOLS, "team-a"): False,
    ("get", "secrets", "inference"): False,
    ("list", POOLS, "inference"): False,
    ("list", "pods", chart.NAMESPACE): False,
    ("patch", "leases.coordination.k8s.io", chart.NAMESPACE): True,
    ("patch", "leases.coordination.k8s.io", "team-a"): False,
    ("list", "nodes", ""): False,
}


def test_the_rights_of_a_namespaced_install(server: ApiServer, release: Release) -> None:
    release.install({**chart.CI["namespaced"], "crds": {"enabled": True}})

    def may(verb: str, resource: str, namespace: str) -> bool:
        where = ("-n", namespace) if namespace else ()
        said = server.kubectl("auth", "can-i", verb, resource, *where, "--as", ACCOUNT, check=False)
        return {"yes": True, "no": False}[said.split()[0]]

    assert {right: may(*right) for right in RIGHTS} == RIGHTS


def test_the_operator_gives_routers_no_right_that_it_lacks(server: ApiServer, release: Release) -> None:
    release.install({**chart.CI["namespaced"], "crds": {"enabled": True}})
    for resource, allowed in (("endpointslices.discovery.k8s.io", True), ("secrets", False)):
        role = ("create", "role", "of-a-pool", "--verb=list", f"--resource={resource}", "-n", "team-a", "--dry-run=server")
        said = server.kubectl(*role, "--as", ACCOUNT, check=False)
        assert ("created" in said) == allowed
        assert ("attempting to grant RBAC permissions not currently held" in said) != allowed


def test_a_team_installs_with_no_rights_beyond_its_namespaces(server: ApiServer) -> None:
    """The two commands of docs/install.md: an administrator's, and that of a team's admin."""
    prepared = chart.objects({**chart.CI["namespaced"], "crds": {"enabled": True}}, namespace="team-a")
    server.apply(*(obj for obj in prepared if "rbac" in obj["apiVersion"] or obj["kind"] == "CustomResourceDefinition"))
    server.kubectl("create", "serviceaccount", "team", "-n", "team-a")
    for namespace in chart.CI["namespaced"]["watch"]["namespaces"]:
        server.kubectl(
            "create", "rolebinding", "team", "--clusterrole=admin", "--serviceaccount=team-a:team", "-n", namespace
        )
    with releases(server.kubeconfig_of("team", "team-a"), "team-a") as release:
        release.install({**chart.CI["namespaced"], "rbac": {"create": False}})
        who = ("--as", "system:serviceaccount:team-a:prefixpool-operator")
        assert server.kubectl("auth", "can-i", "patch", POOLS, "-n", "team-a-staging", *who).split() == ["yes"]
        assert server.kubectl("auth", "can-i", "create", POOLS, "-n", "team-a", "--as", "system:serviceaccount:team-a:team")
