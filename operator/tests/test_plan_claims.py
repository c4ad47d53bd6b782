"""Disks: what cannot be changed in place is said, with what to do, and touches nothing."""

from __future__ import annotations

from prefixpool_operator.observed import Raw
from prefixpool_testing.toy_cluster import ToyCluster, pool


def cache(size: str | None) -> Raw:
    disk = {"disk": {"size": size, "storageClassName": "fast"}} if size else {}
    return {"host": {"memory": "1Gi"}, **disk}


def settled(size: str | None = "20Gi") -> ToyCluster:
    cluster = ToyCluster(pool({"replicas": 2, "kvCache": cache(size)}))
    cluster.run()
    if cluster.stateful is not None and "volumeClaimTemplates" in cluster.stateful["spec"]:
        spec = cluster.stateful["spec"]["volumeClaimTemplates"][0]["spec"]
        cluster.claims = [{"metadata": {"name": f"disk-chat-{n}"}, "spec": spec} for n in range(2)]
    return cluster


def test_a_changed_size_waits_for_a_person_and_other_changes_wait_with_it() -> None:
    cluster = settled()
    revisions = cluster.revisions()
    cluster.edit_spec("kubectl", kvCache=cache("40Gi"), engine={"extraArgs": ["--x"]})
    cluster.run()
    assert cluster.said()["Degraded"] == "True ClaimCannotShrink"
    message = cluster.condition("Degraded")["message"]
    assert "kubectl delete statefulset chat --cascade=orphan" in message
    assert cluster.said()["Progressing"] == "True Waiting"
    assert cluster.pool["status"]["updatedReplicas"] == 0
    assert cluster.revisions() == revisions
    assert cluster.plan().actions == ()


def test_scaling_goes_on_meanwhile() -> None:
    cluster = settled()
    cluster.edit_spec("kubectl", kvCache=cache("40Gi"), replicas=3)
    cluster.run()
    assert len(cluster.pods) == 3


def test_the_former_size_heals() -> None:
    cluster = settled()
    cluster.edit_spec("kubectl", kvCache=cache("40Gi"))
    cluster.run()
    cluster.edit_spec("kubectl", kvCache=cache("20Gi"))
    cluster.run()
    assert cluster.said()["Degraded"] == "False Healthy"
    assert cluster.said()["Progressing"] == "False Settled"


def test_a_stateful_set_made_anew_takes_the_new_size_and_names_the_old_claims() -> None:
    cluster = settled()
    cluster.edit_spec("kubectl", kvCache=cache("40Gi"))
    cluster.run()
    del cluster.children["StatefulSet", "chat"]
    cluster.run()
    assert cluster.said()["Degraded"] == "True ClaimCannotShrink"
    assert "disk-chat-0, disk-chat-1: spec.kvCache.disk needs claims of" in cluster.condition("Degraded")["message"]
    assert cluster.said()["Progressing"] == "False Settled"


def test_a_claim_that_should_shrink() -> None:
    cluster = settled()
    cluster.edit_spec("kubectl", kvCache=cache("10Gi"))
    del cluster.children["StatefulSet", "chat"]
    cluster.run()
    assert "a claim cannot shrink" in cluster.condition("Degraded")["message"]


def test_a_claim_whose_size_is_written_as_we_do_not() -> None:
    cluster = settled()
    claim = {"metadata": {"name": "disk-chat-0", "uid": "c"}, "spec": {"resources": {"requests": {"storage": "1e9"}}}}
    cluster.claims = [claim]
    assert cluster.reconcile().actions == ()


def test_a_disk_added_later_waits_too() -> None:
    cluster = settled(None)
    cluster.edit_spec("kubectl", kvCache=cache("20Gi"))
    cluster.run()
    assert "was made with no claim" in cluster.condition("Degraded")["message"]
    assert "volumeClaimTemplates" not in (cluster.stateful or {})["spec"]


def test_disks_outlive_scaling_but_not_the_pool() -> None:
    cluster = settled()
    assert cluster.stateful is not None
    assert cluster.stateful["spec"]["persistentVolumeClaimRetentionPolicy"] == {
        "whenDeleted": "Delete",
        "whenScaled": "Retain",
    }
