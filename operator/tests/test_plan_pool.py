"""A pool's life as planned: made, idle, edited, scaled, paused, wrong, gone."""

from __future__ import annotations

from typing import Any

import pytest

from prefixpool_operator.actions import Apply, CreateOnce, FillReplicas
from prefixpool_operator.observed import Raw
from prefixpool_testing.agent_info import info
from prefixpool_testing.toy_cluster import STAMP, ToyCluster, pool

ALL = {"Accepted", "Sized", "Available", "Progressing", "Degraded"}


def settled(spec: Raw | None = None) -> ToyCluster:
    cluster = ToyCluster(pool({"replicas": 2, **(spec or {})}))
    cluster.run()
    return cluster


def test_the_first_look_makes_everything_and_says_how_things_stand() -> None:
    cluster = ToyCluster(pool({"replicas": 2}))
    found = cluster.reconcile()
    assert all(isinstance(one, Apply | CreateOnce) and one.reason for one in found.actions)
    assert set(cluster.said()) == ALL
    assert cluster.said()["Available"] == "False NoneReady"
    assert cluster.said()["Progressing"] == "True Starting"
    assert found.events == ()  # nothing is wrong yet


def test_an_idle_pool_causes_no_writes() -> None:
    cluster = settled()
    for later_s in (1, 600, 86_400):
        cluster.now_s += later_s
        found = cluster.plan()
        assert (found.actions, found.status_changed, found.events, found.wake_after_s) == ((), False, (), None)


def test_a_settled_pool() -> None:
    cluster = settled()
    assert cluster.said() == {
        "Accepted": "True Valid",
        "Sized": "True Planned",
        "Available": "True ReplicasReady",
        "Progressing": "False Settled",
        "Degraded": "False Healthy",
    }
    status = cluster.pool["status"]
    assert [status[name] for name in ("replicas", "readyReplicas", "updatedReplicas", "observedGeneration")] == [2, 2, 2, 1]
    assert status["endpoint"] == "http://chat.default.svc"
    assert status["selector"] == "prefixpool.dev/pool=chat,app.kubernetes.io/component=worker"


def test_the_secret_is_created_once_and_never_written_again() -> None:
    cluster = ToyCluster(pool({"replicas": 1}))
    creations = [one for one in cluster.reconcile().actions if isinstance(one, CreateOnce)]
    assert [one.random_keys for one in creations] == [("engine", "salt")]
    cluster.edit("Secret", "chat-keys", lambda obj: obj.update(data={"engine": "rotated", "salt": ""}))
    cluster.edit_spec("kubectl", drain={"timeoutSeconds": 5})
    cluster.run()
    assert cluster.children["Secret", "chat-keys"]["data"] == {"engine": "rotated", "salt": ""}


@pytest.mark.parametrize(
    ("data", "lost"), [({}, "no engine and no salt"), ({"engine": ""}, "no salt"), (None, "no engine and no salt")]
)
def test_a_secret_that_was_emptied_is_told_before_a_pod_fails_to_start(data: Raw | None, lost: str) -> None:
    cluster = ToyCluster(pool())
    cluster.run()
    cluster.edit("Secret", "chat-keys", lambda obj: obj.update(data=data))
    cluster.run()
    assert cluster.said()["Degraded"] == "True SecretMissing"
    assert f"Secret chat-keys has {lost}, so no pod can start" in cluster.condition("Degraded")["message"]
    del cluster.children["Secret", "chat-keys"]
    cluster.run()
    assert cluster.said()["Degraded"] == "False Healthy"


def test_settled_is_said_only_of_the_present_generation_with_all_pods_updated() -> None:
    cluster = settled()
    cluster.edit_spec("kubectl", engine={"extraArgs": ["--x"]})
    for _ in range(3):
        cluster.reconcile()
        assert cluster.condition("Progressing")["status"] == "True"
        assert cluster.condition("Progressing")["observedGeneration"] == 2
        assert cluster.condition("Available")["status"] == "True"
        cluster.controllers()
    cluster.run()
    assert cluster.said()["Progressing"] == "False Settled"


def test_nothing_is_settled_before_kubernetes_has_seen_what_was_written() -> None:
    cluster = settled()
    assert cluster.stateful is not None
    cluster.stateful["metadata"]["generation"] += 1
    cluster.reconcile()
    assert cluster.condition("Progressing")["status"] == "True"


def test_pods_are_not_replaced_before_kubernetes_has_seen_the_new_template() -> None:
    cluster = settled()
    cluster.edit_spec("kubectl", engine={"extraArgs": ["--x"]})
    cluster.reconcile()
    assert cluster.plan().actions == ()
    cluster.controllers()
    assert [one.reason.split(" is of")[0] for one in cluster.plan().actions] == ["pod chat-1"]


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"model": {}}, "spec.model.source"),
        ({"typo": 1}, "spec.typo"),
        ({"kvCache": {"host": {"memory": "12Gx"}}}, "spec.kvCache.host.memory"),
        ({"replicas": "three"}, "spec.replicas"),
        ({"model": None}, "spec.model"),
    ],
)
def test_a_wrong_spec_is_named_and_nothing_is_touched(spec: Raw, field: str) -> None:
    cluster = settled()
    good = dict(cluster.pool["spec"])
    cluster.pool["spec"] = {**good, **spec}
    cluster.pool["metadata"]["generation"] = 2
    found = cluster.reconcile()
    assert found.actions == ()
    assert cluster.said()["Accepted"] == "False InvalidSpec"
    assert field in cluster.condition("Accepted")["message"]
    assert cluster.condition("Available")["status"] == "True"
    assert cluster.condition("Progressing")["status"] == "True"
    assert [one.reason for one in found.events if one.type == "Warning"] == ["InvalidSpec"]
    assert not cluster.plan().status_changed
    cluster.pool["spec"] = good
    cluster.run()
    assert cluster.said()["Accepted"] == "True Valid"
    assert cluster.said()["Progressing"] == "False Settled"


@pytest.mark.parametrize("spec", [None, [], "text", 7])
def test_what_is_no_spec_at_all_does_not_raise(spec: Any) -> None:
    cluster = ToyCluster(pool())
    cluster.pool["spec"] = spec
    cluster.reconcile()
    assert cluster.said()["Accepted"] == "False InvalidSpec"


def test_times_change_only_with_the_status() -> None:
    cluster = settled()
    before = cluster.condition("Available")["lastTransitionTime"]
    cluster.now_s += 3600
    cluster.edit_spec("kubectl", replicas=3)
    cluster.reconcile()
    assert cluster.condition("Available")["lastTransitionTime"] == before
    assert cluster.condition("Available")["observedGeneration"] == 2
    assert cluster.said()["Progressing"] == "True Scaling"
    assert cluster.condition("Progressing")["lastTransitionTime"] == "2027-01-15T09:00:00Z"
    cluster.controllers()
    cluster.now_s += 3600
    cluster.reconcile()
    assert cluster.said()["Progressing"] == "True Starting"
    assert cluster.condition("Progressing")["lastTransitionTime"] == "2027-01-15T09:00:00Z"


def test_paused_changes_nothing_and_goes_on_telling() -> None:
    cluster = settled()
    cluster.edit_spec("kubectl", paused=True, replicas=5)
    assert cluster.reconcile().actions == ()
    assert cluster.said()["Progressing"] == "True Paused"
    cluster.set_ready("chat-0", ready=False)
    cluster.set_ready("chat-1", ready=False)
    cluster.reconcile()
    assert cluster.said()["Available"] == "False NoneReady"
    cluster.edit_spec("kubectl", paused=None)
    cluster.run()
    assert len(cluster.pods) == 5


def test_a_pool_that_is_being_deleted_is_left_alone() -> None:
    cluster = settled()
    cluster.children.clear()
    cluster.pool["metadata"]["deletionTimestamp"] = STAMP
    found = cluster.plan()
    assert (found.actions, found.status_changed) == ((), False)


def test_a_name_that_is_taken_is_said_and_left_alone() -> None:
    cluster = ToyCluster(pool({"replicas": 1}))
    cluster.taken = {("Service", "chat")}
    assert cluster.reconcile().actions == ()
    assert cluster.said()["Accepted"] == "False NameTaken"
    assert "Service chat" in cluster.condition("Accepted")["message"]
    cluster.taken = set()
    cluster.run()
    assert cluster.said()["Accepted"] == "True Valid"


def test_children_of_a_former_pool_of_the_name_are_waited_for() -> None:
    cluster = settled()
    cluster.pool["metadata"]["uid"] = "another"
    for kind, name in [key for key in cluster.children if key[0] != "Service"]:
        del cluster.children[kind, name]
    names = {
        one.object["metadata"]["name"]
        for one in cluster.plan().actions
        if isinstance(one, Apply) and one.object["kind"] == "Service"
    }
    assert names == set()
    cluster.reconcile()
    assert "which is being deleted" in cluster.condition("Progressing")["message"]


def test_a_secret_of_somebody_else_with_the_name_of_the_pools_keys() -> None:
    cluster = ToyCluster(pool({"replicas": 1}))
    cluster.taken = {("Secret", "chat-keys")}
    found = cluster.reconcile()
    assert found.actions == ()
    assert "Secret chat-keys" in cluster.condition("Accepted")["message"]
    assert found.wake_after_s is not None, "no watch tells when it is gone"


def test_keys_of_a_former_pool_of_the_name_reach_no_pod() -> None:
    cluster = ToyCluster(pool({"replicas": 1}))
    owner = {"uid": "former", "controller": True}
    secret = {"kind": "Secret", "metadata": {"name": "chat-keys", "uid": "s", "ownerReferences": [owner]}}
    cluster.children["Secret", "chat-keys"] = secret
    found = cluster.reconcile()
    assert found.actions == ()
    assert found.wake_after_s is not None, "no watch tells when it is gone"
    assert "Secret chat-keys, which is being deleted" in cluster.condition("Progressing")["message"]
    del cluster.children["Secret", "chat-keys"]
    cluster.run()
    assert cluster.said()["Progressing"] == "False Settled"


def test_scale_down_leaves_the_choice_to_the_stateful_set() -> None:
    cluster = settled({"replicas": 3})
    cluster.edit_spec("kubectl", replicas=1)
    cluster.run()
    assert list(cluster.pods) == ["chat-0"]
    assert cluster.said()["Progressing"] == "False Settled"


def test_zero_replicas() -> None:
    cluster = settled({"replicas": 0, "router": {"mode": "Deployment"}})
    assert cluster.said()["Available"] == "False ScaledToZero"


def test_one_broken_pod_does_not_block_scaling() -> None:
    cluster = settled()
    cluster.crash("chat-0")
    cluster.edit_spec("hpa", replicas=4)
    cluster.run(comes_up=lambda pod: pod["metadata"]["name"] != "chat-0")
    assert len(cluster.pods) == 4
    assert cluster.said()["Degraded"] == "True CrashLooping"


def test_a_revision_that_crashes_stops_and_a_fixed_one_goes_on() -> None:
    cluster = settled({"replicas": 3})
    cluster.edit_spec("kubectl", engine={"extraArgs": ["--bad"]})
    for _ in range(8):
        cluster.reconcile()
        cluster.end()
        cluster.controllers()
        for name, pod in cluster.pods.items():
            if "--bad" in str(pod["spec"]["containers"]):
                cluster.crash(name, message="unrecognized arguments: --bad")
    assert sum("--bad" in str(pod["spec"]) for pod in cluster.pods.values()) == 1
    assert cluster.said()["Available"] == "True ReplicasReady"
    assert cluster.said()["Degraded"] == "True CrashLooping"
    assert "unrecognized arguments: --bad" in cluster.condition("Degraded")["message"]
    assert "stopped" in cluster.condition("Progressing")["message"]
    cluster.edit_spec("kubectl", engine={"extraArgs": ["--good"]})
    cluster.run()
    assert cluster.said()["Degraded"] == "False Healthy"
    assert cluster.said()["Progressing"] == "False Settled"


def test_kubectl_rollout_restart_rolls_by_our_rules() -> None:
    cluster = settled()
    uids = {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()}

    def restart(obj: Raw) -> None:
        obj["spec"]["template"]["metadata"]["annotations"]["kubectl.kubernetes.io/restartedAt"] = STAMP

    cluster.edit("StatefulSet", "chat", restart)
    cluster.run()
    assert not set(uids.values()) & {pod["metadata"]["uid"] for pod in cluster.pods.values()}


def test_the_least_cached_value_is_replaced_first() -> None:
    cluster = settled({"replicas": 3})
    for name, blocks in (("chat-0", 5), ("chat-1", 1), ("chat-2", 9)):
        cluster.infos[name] = info(name, resident_blocks=blocks)
    cluster.edit_spec("kubectl", engine={"extraArgs": ["--x"]})
    cluster.reconcile()
    cluster.controllers()
    found = cluster.plan()
    assert [one.reason.split(" is of")[0] for one in found.actions] == ["pod chat-1"]
    assert [one.reason for one in found.done] == ["ReplacingPod"]


def test_routers_move_without_a_gap() -> None:
    cluster = settled()
    selector = lambda: cluster.children["Service", "chat"]["spec"]["selector"]["app.kubernetes.io/component"]  # noqa: E731
    cluster.edit_spec("kubectl", router={"mode": "Deployment"})
    for _ in range(3):
        cluster.reconcile()
        cluster.controllers()
    assert selector() == "worker"
    for pod in cluster.pods.values():  # nobody is replaced yet
        assert "initContainers" in pod["spec"]
        assert "deletionTimestamp" not in pod["metadata"]
    assert cluster.said()["Progressing"] == "True Waiting"
    status = {"replicas": 2, "updatedReplicas": 2, "readyReplicas": 2}
    cluster.children["Deployment", "chat-router"]["status"] = {"observedGeneration": 1, **status}
    cluster.run()
    assert selector() == "router"
    assert not any("initContainers" in pod["spec"] for pod in cluster.pods.values())
    assert cluster.said()["Progressing"] == "False Settled"
    cluster.edit_spec("kubectl", router={"mode": "Sidecar"})
    cluster.reconcile()
    assert selector() == "router"
    cluster.run()
    assert selector() == "worker"
    assert not [key for key in cluster.children if key[1] == "chat-router"]
    assert cluster.said()["Progressing"] == "False Settled"


def test_nothing_sets_replicas_so_the_operator_does() -> None:
    cluster = ToyCluster(pool())
    fills = [one for one in cluster.reconcile().actions if isinstance(one, FillReplicas)]
    assert [one.replicas for one in fills] == [1]
    cluster.run()
    assert cluster.pool["status"]["replicasManagedBy"] == "prefixpool-operator"
