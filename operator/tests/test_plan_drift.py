"""Foreign edits of children: put back once, without a fight; what stands beside ours is nobody's business."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from prefixpool_operator.actions import Apply
from prefixpool_operator.drift import WINDOW_S, differences
from prefixpool_operator.identity import A_PUT_BACK
from prefixpool_operator.observed import Raw
from prefixpool_testing.toy_cluster import ToyCluster, pool


def settled() -> ToyCluster:
    cluster = ToyCluster(pool({"replicas": 2}))
    cluster.run()
    return cluster


def no_selector(obj: Raw) -> None:
    obj["spec"]["selector"] = {"app": "else"}


def test_an_edit_is_put_back_and_told_of() -> None:
    cluster = settled()
    cluster.edit("Service", "chat", no_selector, "rancher")
    found = cluster.reconcile()
    (action,) = found.actions
    assert action.reason.startswith("rancher changed Service chat: spec.selector.prefixpool.dev/pool, spec.selector.app")
    assert (found.done[0].type, found.done[0].reason) == ("Warning", "PutBack")
    assert cluster.children["Service", "chat"]["spec"]["selector"]["prefixpool.dev/pool"] == "chat"
    cluster.run()
    assert cluster.plan().actions == ()
    assert cluster.said()["Degraded"] == "False Healthy"


def test_the_same_edit_again_is_left_alone_for_a_while_and_said() -> None:
    cluster = settled()
    cluster.edit("PodDisruptionBudget", "chat", lambda obj: obj["spec"].update(maxUnavailable=0), "policy")
    cluster.run()
    cluster.edit("PodDisruptionBudget", "chat", lambda obj: obj["spec"].update(maxUnavailable=0), "policy")
    cluster.now_s += 60
    found = cluster.reconcile()
    assert found.actions == ()
    assert found.wake_after_s == pytest.approx(WINDOW_S - 60)
    assert cluster.said()["Degraded"] == "True ForeignEdits"
    assert "policy changed PodDisruptionBudget chat: spec.maxUnavailable again" in cluster.condition("Degraded")["message"]
    assert cluster.plan().actions == ()
    assert not cluster.plan().status_changed
    cluster.now_s += WINDOW_S
    assert len(cluster.reconcile().actions) == 1


@pytest.mark.parametrize("time", ["", "x", "1.2.3", "\u00b2"])
def test_a_note_of_a_foreign_edit_that_somebody_broke(time: str) -> None:
    cluster = settled()
    cluster.edit("Service", "chat", no_selector)
    cluster.reconcile()

    def again(obj: Raw) -> None:
        no_selector(obj)
        annotations = obj["metadata"]["annotations"]
        annotations[A_PUT_BACK] = annotations[A_PUT_BACK].partition("@")[0] + "@" + time

    cluster.edit("Service", "chat", again)
    assert len(cluster.reconcile().actions) == 1


def test_another_edit_is_put_back_at_once() -> None:
    cluster = settled()
    cluster.edit("StatefulSet", "chat", lambda obj: obj["spec"].update(replicas=7))
    cluster.run()
    cluster.edit("StatefulSet", "chat", lambda obj: obj["spec"].update(replicas=8))
    assert len(cluster.reconcile().actions) == 1


def test_the_note_goes_with_the_next_change_of_the_spec() -> None:
    cluster = settled()
    cluster.edit("StatefulSet", "chat", lambda obj: obj["spec"].update(replicas=7))
    cluster.run()
    cluster.edit_spec("kubectl", replicas=3)
    cluster.run()
    assert cluster.stateful is not None
    assert "prefixpool.dev/put-back" not in cluster.stateful["metadata"]["annotations"]


def _beside(obj: Raw) -> None:
    obj["metadata"]["labels"]["team"] = "search"
    obj["metadata"].setdefault("annotations", {})["note"] = "mine"
    obj["spec"]["ipFamilyPolicy"] = "SingleStack"
    obj["spec"]["ports"][0]["nodePort"] = 30000


def _removed_label(obj: Raw) -> None:
    del obj["metadata"]["labels"]["prefixpool.dev/pool"]


def _security(obj: Raw) -> None:
    obj["spec"]["template"]["spec"]["containers"][0]["securityContext"]["readOnlyRootFilesystem"] = False


def _more_ingress(obj: Raw) -> None:
    obj["spec"]["ingress"].append({})


def _env(obj: Raw) -> None:
    obj["spec"]["template"]["spec"]["containers"][0]["env"][1]["value"] = "x"


@pytest.mark.parametrize(
    ("kind", "change", "writes"),
    [
        ("Service", _beside, 0),
        ("StatefulSet", _security, 1),
        ("StatefulSet", _env, 1),
        ("NetworkPolicy", _more_ingress, 1),
        ("ServiceAccount", _removed_label, 1),
    ],
)
def test_what_is_ours_and_what_is_not(kind: str, change: Callable[[Raw], None], writes: int) -> None:
    cluster = settled()
    cluster.edit(kind, "chat", change)
    found = [one for one in cluster.plan().actions if isinstance(one, Apply)]
    assert len(found) == writes


def test_a_child_that_somebody_deleted_is_made_again() -> None:
    cluster = settled()
    del cluster.children["PodDisruptionBudget", "chat"]
    assert [(type(one), getattr(one, "absent", None)) for one in cluster.reconcile().actions] == [(Apply, True)]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"a": 1}, {"a": 1, "defaulted": True}),
        ({"memory": "1073741824"}, {"memory": "1Gi"}),
        ({"cpu": "4"}, {"cpu": "4000m"}),
        ({"cpu": "100m"}, {"cpu": "0.1"}),
        ({"value": ""}, {}),
        ({"items": [], "labels": {}}, {}),
        ({"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "B"}, {"name": "A", "value": "1"}]}),
        ({"rules": [{"verbs": ["get"]}]}, {"rules": [{"verbs": ["get"], "apiGroups": [""]}]}),
    ],
)
def test_what_the_api_server_makes_of_ours_is_no_edit(ours: Any, theirs: Any) -> None:
    assert differences(ours, theirs) == {}


@pytest.mark.parametrize(
    ("ours", "theirs", "paths"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 2}}, ["a.b"]),
        ({"a": False}, {}, ["a"]),
        ({"a": {"b": 1}}, {"a": None}, ["a"]),
        ({"args": ["--x"]}, {"args": ["--x", "--y"]}, ["args"]),
        ({"env": [{"name": "A", "value": "1"}]}, {"env": []}, ["env[A]"]),
        ({"memory": "1Gi"}, {"memory": "2Gi"}, ["memory"]),
        ({"name": "a"}, {"name": "b"}, ["name"]),
        ({"selector": {"a": "1"}}, {"selector": {"a": "1", "b": "2"}}, ["selector.b"]),
    ],
)
def test_edits(ours: Any, theirs: Any, paths: list[str]) -> None:
    assert list(differences(ours, theirs)) == paths
