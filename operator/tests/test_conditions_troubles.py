"""Degraded: a person reads what is wrong and what to do, and a program one reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prefixpool.api.status import MESSAGE_MOST
from prefixpool.wire import DiskCause, DiskProblem, Download, Mode, State
from prefixpool_operator.actions import FIELD_MANAGER
from prefixpool_operator.hindrances import RECENT_S
from prefixpool_operator.observed import Node, Raw
from prefixpool_operator.timestamp import seconds
from prefixpool_operator.troubles import LOOK_S, OOM_TOLD_S, STUCK_S
from prefixpool_testing.agent_info import info
from prefixpool_testing.toy_cluster import NOW, STAMP, ToyCluster, pool


def settled(replicas: int = 2) -> ToyCluster:
    cluster = ToyCluster(pool({"replicas": replicas}), nodes=(Node(name="node-1", ready=True),))
    cluster.run()
    return cluster


def unschedulable(message: str) -> Callable[[ToyCluster], None]:
    def make(cluster: ToyCluster) -> None:
        scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        cluster.pods["chat-0"]["status"] = {"phase": "Pending", "conditions": [scheduled]}

    return make


def crash(**ended: object) -> Callable[[ToyCluster], None]:
    return lambda cluster: cluster.crash("chat-0", **ended)


def waiting(reason: str, message: str) -> Callable[[ToyCluster], None]:
    def make(cluster: ToyCluster) -> None:
        cluster.set_ready("chat-0", ready=False)
        cluster.wait_for("chat-0", reason, message)

    return make


def told(**of_info: object) -> Callable[[ToyCluster], None]:
    def make(cluster: ToyCluster) -> None:
        cluster.set_ready("chat-0", ready=of_info.pop("ready", False) is True)
        cluster.infos["chat-0"] = info("chat-0", **of_info)

    return make


@pytest.mark.parametrize(
    ("happens", "reason", "words"),
    [
        (
            unschedulable("0/5 nodes are available: 5 Insufficient nvidia.com/gpu."),
            "Unschedulable",
            ("chat-0: no node takes it: 0/5 nodes are available: 5 Insufficient nvidia.com/gpu.",),
        ),
        (unschedulable('persistentvolumeclaim "w" not found'), "ClaimPending", ('persistentvolumeclaim "w" not found',)),
        (
            crash(message="Traceback\nValueError: No available memory for the cache blocks\n"),
            "CrashLooping",
            ("worker does not stay up: ValueError: No available memory for the cache blocks (exit code 1)",),
        ),
        (crash(exitCode=139), "CrashLooping", ("exit code 139", "kubectl logs --previous -c worker")),
        (crash(container="router", exitCode=2), "CrashLooping", ("router does not stay up",)),
        (
            crash(reason="OOMKilled", exitCode=137),
            "OutOfMemory",
            ("limit of 4.5 GiB", "raise spec.engine.resources.limits.memory", "kvCache.host.memory"),
        ),
        (
            waiting("ImagePullBackOff", 'Back-off pulling image "x": ErrImagePull: 401 Unauthorized'),
            "ImageUnavailable",
            ("image registry.local/worker:1 cannot be had: 401 Unauthorized",),
        ),
        (waiting("CreateContainerConfigError", 'secret "hub" not found'), "SecretMissing", ('secret "hub" not found',)),
        (
            told(state=State.FAILED, reason="5 starts in a row ended: CUDA out of memory"),
            "CrashLooping",
            ("the engine was given up: 5 starts in a row ended: CUDA out of memory",),
        ),
        (
            told(state=State.STARTING, restarts=3, reason="killed by signal 9"),
            "CrashLooping",
            ("the engine does not stay up: killed by signal 9",),
        ),
        (
            told(state=State.STARTING, download=Download(model="org/m", problem="the Hub has no org/m")),
            "DownloadFailed",
            ("org/m does not come: the Hub has no org/m",),
        ),
        (
            told(state=State.FAILED, reason="late", download=Download(model="org/m", problem="no space is left")),
            "DownloadFailed",
            ("no space is left", "the engine was given up: late"),
        ),
        (told(mode=Mode.APPROXIMATE, reason="no KV events", ready=True), "Approximate", ("no KV events",)),
        (
            told(disk=DiskProblem(cause=DiskCause.FULL, words="half or more of what it writes"), ready=True),
            "DiskTierFailing",
            ("chat-0: its disk tier fails", "half or more of what it writes"),
        ),
    ],
)
def test_trouble(happens: Callable[[ToyCluster], None], reason: str, words: tuple[str, ...]) -> None:
    cluster = settled()
    happens(cluster)
    found = cluster.reconcile()
    assert cluster.said()["Degraded"] == f"True {reason}"
    assert all(word in cluster.condition("Degraded")["message"] for word in words), cluster.condition("Degraded")["message"]
    assert [one.reason for one in found.events if one.reason == reason] == [reason]
    assert not cluster.plan().status_changed
    assert cluster.plan().events == ()
    cluster.infos.clear()
    cluster.set_ready("chat-0")
    cluster.reconcile()
    assert cluster.said()["Degraded"] == "False Healthy"


def test_pods_with_the_same_trouble_are_told_together() -> None:
    cluster = settled(9)
    for name in cluster.pods:
        cluster.crash(name, exitCode=1)
    cluster.reconcile()
    message = cluster.condition("Degraded")["message"]
    assert message.startswith("chat-0, chat-1, chat-2, chat-3, chat-4 and 4 more: worker")
    assert "\n" not in message


def test_a_restart_count_that_grows_changes_no_status() -> None:
    cluster = settled()
    cluster.crash("chat-0")
    cluster.reconcile()
    cluster.pods["chat-0"]["status"]["containerStatuses"][0]["restartCount"] = 77
    assert not cluster.plan().status_changed


def test_an_out_of_memory_kill_is_told_for_a_while_after_recovery() -> None:
    cluster = settled()
    ended = {"terminated": {"reason": "OOMKilled", "exitCode": 137, "finishedAt": STAMP}}
    cluster.pods["chat-0"]["status"]["containerStatuses"][0]["lastState"] = ended
    found = cluster.reconcile()
    assert cluster.said()["Degraded"] == "True OutOfMemory"
    assert found.wake_after_s == OOM_TOLD_S
    cluster.now_s = NOW + OOM_TOLD_S
    cluster.reconcile()
    assert cluster.said()["Degraded"] == "False Healthy"


def lose_node(cluster: ToyCluster) -> None:
    cluster.nodes = (Node(name="node-1", ready=False),)


def test_a_pod_that_does_not_end_is_told_after_its_time() -> None:
    cluster = settled()
    cluster.terminate("chat-1")
    found = cluster.reconcile()
    assert cluster.said()["Degraded"] == "False Healthy"
    assert found.wake_after_s == STUCK_S
    cluster.now_s += STUCK_S
    assert cluster.reconcile().wake_after_s is None
    assert cluster.said()["Degraded"] == "True StuckTerminating"
    assert "kubectl delete pod chat-1 --force --grace-period=0" in cluster.condition("Degraded")["message"]
    assert cluster.said()["Available"] == "True ReplicasReady"


def test_a_pod_on_a_dead_node_says_how_to_get_rid_of_it() -> None:
    cluster = settled()
    lose_node(cluster)
    cluster.pods["chat-1"]["status"]["conditions"][0]["status"] = "False"
    cluster.reconcile()
    assert cluster.said()["Degraded"] == "True NodeLost"
    assert "node node-1 is not ready" in cluster.condition("Degraded")["message"]
    cluster.terminate("chat-1")
    cluster.now_s += STUCK_S
    cluster.reconcile()
    message = cluster.condition("Degraded")["message"]
    assert "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute" in message
    assert "kubectl delete pod chat-1 --force" in message


@pytest.mark.parametrize("nodes", [(), (Node(name="node-1", ready=False),)], ids=["unknown", "not ready yet"])
def test_a_pod_on_a_node_that_just_joined_is_no_pod_on_a_lost_node(nodes: tuple[Node, ...]) -> None:
    """Nodes are read now and then: with each node that an autoscaler added, pools called it lost."""
    cluster = settled()
    cluster.nodes = nodes
    cluster.set_ready("chat-0", ready=False)
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": STAMP}
    cluster.pods["chat-0"]["status"]["conditions"].append(scheduled)
    assert cluster.reconcile().wake_after_s is not None
    assert cluster.said()["Degraded"] == "False Healthy"
    cluster.now_s += 120
    cluster.reconcile()
    assert cluster.said()["Degraded"] == "True NodeLost"


def test_a_ready_pod_on_a_node_nobody_may_read_is_no_trouble() -> None:
    cluster = settled()
    cluster.nodes = None
    cluster.reconcile()
    assert cluster.said()["Degraded"] == "False Healthy"


def test_several_troubles_are_all_told_causes_first() -> None:
    cluster = settled()
    cluster.crash("chat-0")
    cluster.crash("chat-1", reason="OOMKilled", exitCode=137)
    cluster.reconcile()
    assert cluster.said()["Degraded"] == "True OutOfMemory"
    assert cluster.condition("Degraded")["message"].count("\n") == 1


def test_too_few_ready() -> None:
    cluster = settled(3)
    for name in ("chat-0", "chat-1"):
        cluster.set_ready(name, ready=False)
    found = cluster.reconcile()
    assert cluster.said()["Available"] == "False TooFewReady"
    assert [(one.type, one.reason) for one in found.events if one.reason == "TooFewReady"] == [("Warning", "TooFewReady")]


@pytest.mark.parametrize(("mode", "logs"), [("Sidecar", "chat-0 -c router"), ("Deployment", "deployment/chat-router")])
def test_an_engine_that_is_up_and_that_no_router_knows(mode: str, logs: str) -> None:
    cluster = ToyCluster(pool({"replicas": 1, "router": {"mode": mode}}))
    cluster.run()
    if mode == "Deployment":
        cluster.children["Deployment", "chat-router"]["status"]["readyReplicas"] = 1
    cluster.set_ready("chat-0", ready=False)
    cluster.infos["chat-0"] = info("chat-0")
    cluster.reconcile()
    message = cluster.condition("Available")["message"]
    assert message == (
        f"0 of 1 replicas are ready. The engine of chat-0 is up, but no router knows it yet: `kubectl logs {logs}`."
    )


def test_routers_of_their_own_must_be_ready_too() -> None:
    cluster = ToyCluster(pool({"replicas": 1, "router": {"mode": "Deployment"}}))
    cluster.run()
    assert cluster.said()["Available"] == "False NoneReady"
    assert cluster.said()["Progressing"].startswith("True")


def test_a_stateful_set_that_may_make_no_pods() -> None:
    cluster = ToyCluster(pool({"replicas": 2}))
    cluster.reconcile()
    cluster.edit("StatefulSet", "chat", lambda obj: None, FIELD_MANAGER)
    assert cluster.reconcile().wake_after_s == LOOK_S
    assert cluster.said()["Degraded"] == "False Healthy"
    cluster.now_s += 60
    assert cluster.reconcile().wake_after_s == LOOK_S
    assert cluster.said()["Degraded"] == "True PodRefused"
    cluster.controllers()
    cluster.reconcile()
    assert cluster.said()["Degraded"] == "False Healthy"


def test_a_quota_with_room_for_some_replicas_only() -> None:
    cluster = settled()
    assert cluster.stateful is not None
    cluster.warn(cluster.stateful, 'create Pod chat-2 failed: pods "chat-2" is forbidden: exceeded quota: team')
    cluster.edit_spec("kubectl", replicas=3)
    cluster.reconcile()
    cluster.reconcile()
    assert cluster.said()["Degraded"] == "True PodRefused"
    assert "exceeded quota: team" in cluster.condition("Degraded")["message"]
    cluster.pods["chat-1"]["metadata"]["creationTimestamp"] = "2027-01-15T08:00:01Z"
    cluster.reconcile()
    assert cluster.said()["Degraded"] == "False Healthy", "pods were made since then"


MISSING = 'MountVolume.SetUp failed for volume "auth" : secret "clients" not found'


def test_a_missing_secret_is_told_in_the_kubelets_words() -> None:
    cluster = settled()
    for name in ("chat-0", "chat-1"):
        cluster.unmake(name)
        cluster.warn(cluster.pods[name], "Unable to attach or mount volumes: unmounted volumes=[auth]: timed out")
        cluster.warn(cluster.pods[name], MISSING)
    cluster.reconcile()
    assert cluster.said()["Degraded"] == "True SecretMissing"
    assert cluster.condition("Degraded")["message"] == f"chat-0, chat-1: its containers cannot be made: {MISSING}"
    cluster.now_s += RECENT_S + 1
    cluster.reconcile()
    assert MISSING not in cluster.condition("Degraded")["message"], "that was long ago"
    assert cluster.said()["Degraded"] == "True MountFailed"


def test_a_probe_that_failed_is_not_taken_for_a_mount_that_did() -> None:
    """Seen on a slow node, whose kubelet tells late that containers were made."""
    cluster = settled()
    cluster.unmake("chat-0")
    cluster.warn(cluster.pods["chat-0"], "Readiness probe failed: connection refused", reason="Unhealthy")
    cluster.reconcile()
    assert cluster.said()["Degraded"] == "False Healthy"


def test_a_pod_without_volumes_or_network_where_events_may_not_be_read() -> None:
    cluster = settled()
    cluster.unmake("chat-0")
    cluster.reconcile()
    assert cluster.said()["Degraded"] == "False Healthy", "that takes a while"
    cluster.now_s += 60
    cluster.reconcile()
    assert cluster.said()["Degraded"] == "True MountFailed"
    assert "kubectl describe pod" in cluster.condition("Degraded")["message"]


def test_replicas_that_are_not_ready_are_looked_at_again_because_no_watch_tells_what_agents_learn() -> None:
    cluster = settled()
    assert cluster.reconcile().wake_after_s is None
    cluster.set_ready("chat-0", ready=False)
    assert cluster.reconcile().wake_after_s == LOOK_S


def test_an_evicted_pod_that_nobody_cleans_up_is_no_trouble() -> None:
    cluster = settled()
    cluster.crash("chat-1", reason="OOMKilled")
    cluster.pods["chat-1"]["status"]["phase"] = "Failed"
    cluster.reconcile()
    assert cluster.said()["Degraded"] == "False Healthy"
    assert cluster.pool["status"]["replicas"] == 1


def test_a_failed_pod_that_a_finalizer_keeps_is_still_told() -> None:
    cluster = settled()
    cluster.terminate("chat-1")
    cluster.pods["chat-1"]["status"]["phase"] = "Failed"  # Kubernetes' collector of pods says so of those without a node
    cluster.now_s += STUCK_S
    cluster.reconcile()
    assert cluster.said()["Degraded"] == "True StuckTerminating"


def test_a_change_that_the_api_server_refuses_is_told_until_it_is_taken() -> None:
    cluster = settled()
    cluster.refused = 'statefulsets.apps "chat" is forbidden: no such priority class'
    cluster.reconcile()
    assert cluster.said()["Degraded"] == "True WriteRefused"
    assert "no such priority class" in cluster.condition("Degraded")["message"]
    cluster.refused = ""
    cluster.reconcile()
    assert cluster.said()["Degraded"] == "False Healthy"


def test_routers_of_their_own_that_are_down_are_told_while_the_spec_is_wrong() -> None:
    cluster = ToyCluster(pool({"replicas": 1, "router": {"mode": "Deployment"}}))
    cluster.run()
    cluster.edit_spec("kubectl", typo=1)
    cluster.reconcile()
    assert cluster.said()["Accepted"] == "False InvalidSpec"
    assert cluster.said()["Available"] == "False NoneReady"


def test_half_filled_pods_are_read() -> None:
    cluster = settled()
    raw: Raw = {"metadata": {"name": "chat-1", "uid": "x", "labels": {"app.kubernetes.io/component": "worker"}}}
    cluster.pods["chat-1"] = raw
    cluster.reconcile()
    assert cluster.pool["status"]["readyReplicas"] == 1


def test_times() -> None:
    assert seconds(STAMP) == NOW


def test_many_pods_with_a_trouble_of_their_own_fit_into_a_status() -> None:
    """The API server refuses a longer message, and with it the whole status, when it is needed most."""
    cluster = settled(replicas=120)
    for name in cluster.pods:
        cluster.crash(name, message=f"{name}: {'no such device ' * 15}")
    cluster.reconcile()
    message = cluster.condition("Degraded")["message"]
    assert len(message) <= MESSAGE_MOST
    assert message.endswith("And 108 more.")


def test_a_rollout_that_stopped_at_many_pods_fits_into_a_status() -> None:
    cluster = ToyCluster(pool({"replicas": 60, "rollout": {"maxUnavailable": 59}}, name="a" * 40))
    cluster.run()
    cluster.edit_spec("kubectl", engine={"maxNumSeqs": 7})
    for _ in range(3):
        cluster.reconcile()
        cluster.end()
        cluster.controllers()
    for name, pod in cluster.pods.items():
        if pod["status"]["conditions"][0]["status"] == "False":
            cluster.crash(name)
    cluster.reconcile()
    message = cluster.condition("Progressing")["message"]
    assert "has stopped" in message
    assert len(message) < 400
