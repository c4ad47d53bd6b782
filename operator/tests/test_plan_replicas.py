"""Who says how many replicas: the budget while nobody else does, and whoever else does."""

from __future__ import annotations

import pytest

from prefixpool_operator.actions import FillReplicas
from prefixpool_operator.observed import Raw
from prefixpool_testing.agent_info import info
from prefixpool_testing.toy_cluster import ToyCluster, pool

BUDGET = {"kvBudget": {"residentTokens": 150_000}}  # a replica holds 61,056


def budgeted(spec: Raw | None = None) -> ToyCluster:
    cluster = ToyCluster(pool({**BUDGET, **(spec or {})}))
    cluster.run()
    return cluster


def test_the_budget_fills_replicas() -> None:
    cluster = budgeted()
    assert cluster.pool["spec"]["replicas"] == 3
    assert len(cluster.pods) == 3
    assert cluster.pool["status"]["replicasManagedBy"] == "prefixpool-operator"
    assert cluster.pool["status"]["sizing"]["replicas"] == 3
    cluster.edit_spec("kubectl", kvBudget={"residentTokens": 240_000})
    cluster.run()
    assert cluster.pool["spec"]["replicas"] == 4


@pytest.mark.parametrize(("bounds", "replicas"), [({"maxReplicas": 2}, 2), ({"minReplicas": 5}, 5), ({"minReplicas": 1}, 3)])
def test_budgets_are_bounded(bounds: Raw, replicas: int) -> None:
    assert budgeted(bounds).pool["spec"]["replicas"] == replicas


def test_a_budget_of_more_replicas_than_a_pool_may_have_is_told_instead_of_a_write_that_is_refused() -> None:
    cluster = budgeted({"kvBudget": {"residentTokens": 10**15}})
    assert cluster.children == {}
    assert "replicas" not in cluster.pool["spec"]
    assert cluster.said()["Sized"] == "False Refused"
    assert "a pool has 1,000 at most: lower spec.kvBudget" in cluster.condition("Sized")["message"]
    cluster.edit_spec("kubectl", maxReplicas=2)
    cluster.run()
    assert len(cluster.pods) == 2
    assert cluster.said()["Sized"] == "True Planned"


def test_somebody_who_scales_wins_and_is_named() -> None:
    cluster = budgeted()
    cluster.edit_spec("kubectl-scale", replicas=5)
    cluster.run()
    assert len(cluster.pods) == 5
    assert cluster.pool["status"]["replicasManagedBy"] == "kubectl-scale"
    message = cluster.condition("Sized")["message"]
    assert "spec.replicas is 5 and belongs to kubectl-scale; kvBudget asks for 3" in message
    cluster.edit_spec("kubectl", kvBudget={"residentTokens": 400_000})
    found = cluster.reconcile()
    assert not [one for one in found.actions if isinstance(one, FillReplicas)]
    assert cluster.pool["spec"]["replicas"] == 5
    assert "kvBudget asks for 7" in cluster.condition("Sized")["message"]


def test_a_manifest_that_says_the_same_number_owns_it_too() -> None:
    cluster = budgeted()
    entry = {"manager": "argocd", "operation": "Apply", "fieldsV1": {"f:spec": {"f:replicas": {}}}}
    cluster.pool["metadata"]["managedFields"].append(entry)
    cluster.edit_spec("kubectl", kvBudget={"residentTokens": 400_000})
    cluster.run()
    assert cluster.pool["spec"]["replicas"] == 3


def test_removing_the_field_gives_it_back_to_the_budget() -> None:
    cluster = budgeted()
    cluster.edit_spec("kubectl-scale", replicas=5)
    cluster.run()
    cluster.edit_spec("kubectl", replicas=None)
    cluster.run()
    assert cluster.pool["spec"]["replicas"] == 3
    assert cluster.pool["status"]["replicasManagedBy"] == "prefixpool-operator"


def test_engines_that_hold_less_than_planned_make_more_replicas() -> None:
    cluster = budgeted()
    for name in cluster.pods:
        cluster.infos[name] = info(name, device_blocks=1000)
    cluster.run()
    assert cluster.pool["spec"]["replicas"] == 5
    assert cluster.said()["Sized"] == "True Measured"


def test_many_owners_with_long_names_fit_into_a_status() -> None:
    """The API server refuses a longer word, and with it the whole status."""
    cluster = budgeted()
    for letter in "abc":
        cluster.edit_spec(letter * 128)
        cluster.pool["metadata"]["managedFields"][-1]["fieldsV1"]["f:spec"]["f:replicas"] = {}
    cluster.reconcile()
    assert cluster.pool["status"]["replicasManagedBy"].startswith("aaa")
    assert len(cluster.pool["status"]["replicasManagedBy"]) == 253
