"""The operator's rights: those of the one source, where they are asked for and nowhere else."""

from typing import Any

import pytest
import yaml

from prefixpool_operator.identity import Identity
from prefixpool_operator.render import access
from prefixpool_testing import chart

Raw = dict[str, Any]

SOURCE: dict[str, list[Raw]] = yaml.safe_load((chart.FOLDER / "files/operator-rules.yaml").read_text())
NAMESPACES = ["team-a", "team-b"]


def grants(values: Raw | None = None) -> dict[tuple[str, str | None], list[Raw]]:
    """(name of the role, namespace or None for the whole cluster) → rules, of roles that are bound to the operator."""
    found = chart.objects(values)
    roles = {where(each, each["metadata"]["name"]): each["rules"] for each in found if each["kind"].endswith("Role")}
    bindings = [each for each in found if each["kind"].endswith("RoleBinding")]
    account = next(each["spec"]["template"]["spec"]["serviceAccountName"] for each in found if each["kind"] == "Deployment")
    for each in bindings:
        assert each["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": chart.NAMESPACE}]
    return {where(each, each["roleRef"]["name"]): roles[where(each, each["roleRef"]["name"])] for each in bindings}


def where(each: Raw, name: str) -> tuple[str, str | None]:
    return name, each["metadata"].get("namespace")


LEASE = {("prefixpool-operator-lease", chart.NAMESPACE): SOURCE["leadership"]}
POOLS = [*SOURCE["pools"], *SOURCE["routers"]]


def test_in_the_whole_cluster() -> None:
    assert grants() == LEASE | {("prefixpool-operator", None): POOLS, ("prefixpool-operator-nodes", None): SOURCE["nodes"]}


def test_in_named_namespaces_only() -> None:
    found = grants({"watch": {"namespaces": NAMESPACES}, "rbac": {"readNodes": False}})
    assert found == LEASE | {("prefixpool-operator", namespace): POOLS for namespace in NAMESPACES}


def test_a_team_needs_nothing_of_the_cluster() -> None:
    assert not [each["kind"] for each in chart.objects(chart.CI["namespaced"]) if "namespace" not in each["metadata"]]


def test_rights_that_can_be_left_out() -> None:
    assert grants({"rbac": {"routerRoles": False}})["prefixpool-operator", None] == SOURCE["pools"]
    assert not [each for each in chart.objects({"rbac": {"create": False}}) if "rbac" in each["apiVersion"]]


def test_an_account_that_exists_already() -> None:
    found = chart.objects({"serviceAccount": {"create": False, "name": "mine"}})
    assert not [each for each in found if each["kind"] == "ServiceAccount"]
    assert {each["subjects"][0]["name"] for each in found if "subjects" in each} == {"mine"}


def test_people_get_pools_with_their_own_rights_on_a_namespace() -> None:
    roles = {each["metadata"]["name"]: each for each in chart.objects() if each["kind"] == "ClusterRole"}
    view, edit = roles["prefixpool-view"], roles["prefixpool-edit"]
    assert view["rules"][0]["verbs"] == ["get", "list", "watch"]
    assert "rbac.authorization.k8s.io/aggregate-to-view" not in edit["metadata"]["labels"]
    assert edit["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-edit"] == "true"
    assert [each["resources"] for role in (view, edit) for each in role["rules"]] == [
        ["inferencepools", "inferencepools/scale"]
    ] * 2


@pytest.mark.parametrize("rules", SOURCE.values(), ids=SOURCE)
def test_rights_name_what_they_are_about_and_secrets_are_never_listed(rules: list[Raw]) -> None:
    for rule in rules:
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
        assert "secrets" not in rule["resources"] or not {"list", "watch"} & set(rule["verbs"])


def test_the_operator_holds_all_that_it_gives_to_routers() -> None:
    """The API server lets nobody make a Role with rights that he does not have."""
    given = access.role(Identity(name="p", namespace="n", uid="", generation=1))["rules"]
    held = {(group, resource, verb) for rule in POOLS for group, resource, verb in triples(rule)}
    assert {triple for rule in given for triple in triples(rule)} <= held


def triples(rule: Raw) -> list[tuple[str, str, str]]:
    return [
        (group, resource, verb) for group in rule["apiGroups"] for resource in rule["resources"] for verb in rule["verbs"]
    ]
