"""A pod template changes only with the spec: not with the operator, not with what engines report."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest

from prefixpool.api.spec import PoolSpec
from prefixpool_operator import digest, pinned
from prefixpool_operator.observed import Raw
from prefixpool_testing.agent_info import info
from prefixpool_testing.toy_cluster import SETTINGS, ToyCluster, pool


def settled(spec: Raw | None = None) -> ToyCluster:
    cluster = ToyCluster(pool({"replicas": 2, **(spec or {})}))
    cluster.run()
    return cluster


def test_an_upgrade_with_changed_defaults_rolls_nothing() -> None:
    cluster = settled()
    before = copy.deepcopy(cluster.pods)
    cluster.settings = msgspec.structs.replace(SETTINGS, worker_image="registry.local/worker:2", image_pull_policy="Always")
    assert cluster.plan().actions == ()
    cluster.run()
    assert cluster.pods == before


def test_a_changed_default_takes_effect_with_the_next_change_of_the_spec() -> None:
    cluster = settled()
    cluster.settings = msgspec.structs.replace(SETTINGS, worker_image="registry.local/worker:2")
    cluster.edit_spec("kubectl", drain={"timeoutSeconds": 9})
    cluster.run()
    assert {pod["spec"]["containers"][0]["image"] for pod in cluster.pods.values()} == {"registry.local/worker:2"}


def test_a_new_router_image_keeps_pods_and_is_in_the_template_too() -> None:
    cluster = settled()
    uids = {pod["metadata"]["uid"] for pod in cluster.pods.values()}
    cluster.settings = msgspec.structs.replace(SETTINGS, router_image="registry.local/router:2")
    cluster.reconcile()
    cluster.reconcile()
    assert "Only routers change, in place; engines run on." in cluster.condition("Progressing")["message"]
    cluster.run()
    assert {pod["metadata"]["uid"] for pod in cluster.pods.values()} == uids
    templates = [cluster.stateful["spec"]["template"]] if cluster.stateful else []
    for one in (*cluster.pods.values(), *templates):
        assert one["spec"]["initContainers"][0]["image"] == "registry.local/router:2"
    assert cluster.said()["Progressing"] == "False Settled"


def test_what_is_no_part_of_pods_rolls_nothing() -> None:
    cluster = settled()
    revisions = cluster.revisions()
    cluster.edit_spec("kubectl", rollout={"maxUnavailable": 2}, replicas=3)
    cluster.run()
    assert set(cluster.revisions().values()) == set(revisions.values())


def test_an_access_log_of_routers_apart_and_one_that_stays_off_roll_nothing() -> None:
    """In a sidecar, only a new pod brings it."""
    cluster = settled()
    revisions = cluster.revisions()
    cluster.edit_spec("kubectl", router={"accessLog": False})
    cluster.run()
    assert cluster.revisions() == revisions
    cluster.edit_spec("kubectl", router={"accessLog": True})
    cluster.run()
    assert set(revisions.values()).isdisjoint(cluster.revisions().values())
    apart = settled({"router": {"mode": "Deployment"}})
    revisions = apart.revisions()
    apart.edit_spec("kubectl", router={"mode": "Deployment", "accessLog": True})
    apart.run()
    assert apart.revisions() == revisions


def test_measured_blocks_roll_nothing() -> None:
    cluster = settled()
    revisions = cluster.revisions()
    for name in cluster.pods:
        cluster.infos[name] = info(name, device_blocks=900)
    cluster.run()
    assert cluster.said()["Sized"] == "True Measured"
    assert cluster.revisions() == revisions


def test_going_back_to_a_former_spec_makes_its_pods_right_again() -> None:
    cluster = settled({"engine": {"extraArgs": ["--one"]}})
    first = cluster.revisions()
    cluster.edit_spec("kubectl", engine={"extraArgs": ["--two"]})
    cluster.reconcile()
    cluster.edit_spec("kubectl", engine={"extraArgs": ["--one"]})
    cluster.run()
    assert cluster.revisions() == first


def test_a_lost_note_of_the_template_is_written_again() -> None:
    cluster = settled()
    cluster.edit("StatefulSet", "chat", lambda obj: obj["metadata"]["annotations"].pop("prefixpool.dev/template"))
    revisions = cluster.revisions()
    cluster.run()
    assert cluster.revisions() == revisions
    assert cluster.stateful is not None
    assert "prefixpool.dev/template" in cluster.stateful["metadata"]["annotations"]


def test_rendering_is_a_function() -> None:
    first, second = settled(), settled()
    assert first.children == second.children


def test_the_hash_of_a_spec_is_computed_once_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a millisecond or more, and five pieces of a plan ask for it."""
    cluster = settled()
    hashed: list[PoolSpec] = []

    def given(value: Any) -> Any:
        hashed.append(value)
        return digest.given(value)

    monkeypatch.setattr(pinned, "given", given)
    assert cluster.plan().actions == ()
    assert len(hashed) == 1
