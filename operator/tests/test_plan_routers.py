"""Routers beside engines: replaced in place, whatever admission makes of their image."""

from __future__ import annotations

from msgspec.structs import replace

from prefixpool_operator.actions import PatchImage, Plan
from prefixpool_operator.observed import Raw
from prefixpool_testing.toy_cluster import SETTINGS, ToyCluster, pool

NEXT = replace(SETTINGS, router_image="registry.local/router:2")


class Mirrored(ToyCluster):
    """A webhook puts a mirror's name into every pod that is written."""

    def _pod(self, name: str, stateful: Raw) -> Raw:
        return mirrored(super()._pod(name, stateful))

    def _patch_image(self, action: PatchImage) -> None:
        super()._patch_image(action)
        mirrored(self.pods[action.pod])


def mirrored(pod: Raw) -> Raw:
    for container in pod["spec"]["initContainers"]:
        container["image"] = container["image"].replace("registry.local", "mirror.local")
    return pod


def patched(plan: Plan) -> list[str]:
    return [action.pod for action in plan.actions if isinstance(action, PatchImage)]


def test_a_webhook_that_rewrites_images_does_not_stop_rollouts() -> None:
    """What a pod runs was never what was asked for: its router counted as about to be replaced for ever."""
    cluster = Mirrored(pool({"replicas": 3}))
    cluster.run()
    assert patched(cluster.plan()) == []
    cluster.settings = NEXT
    cluster.run()
    images = {pod["spec"]["initContainers"][0]["image"] for pod in cluster.pods.values()}
    assert images == {"mirror.local/router:2"}
    before = cluster.revisions()
    cluster.edit_spec("kubectl", engine={"maxNumSeqs": 7})
    cluster.run()
    assert set(before.values()).isdisjoint(cluster.revisions().values())
    assert cluster.said()["Progressing"] == "False Settled"


def test_pods_of_an_earlier_operator_whose_images_were_rewritten_do_not_stop_rollouts() -> None:
    cluster = Mirrored(pool({"replicas": 3}))
    cluster.run()
    for pod in cluster.pods.values():
        del pod["metadata"]["annotations"]["prefixpool.dev/router-image"]
    cluster.run()
    assert cluster.said()["Progressing"] == "False Settled"


def test_a_router_image_that_is_taken_back_before_the_kubelet_looked_does_not_stop_rollouts() -> None:
    """Nothing restarts then: when its node is back, the container with the first image runs on."""
    cluster = ToyCluster(pool({"replicas": 1}))
    cluster.run()
    cluster.pods["chat-0"]["status"]["conditions"][0]["status"] = "False"
    for settings in (NEXT, SETTINGS):
        cluster.settings = settings
        cluster.reconcile()
        cluster.controllers()
        assert patched(cluster.reconcile()) == ["chat-0"]
    cluster.pods["chat-0"]["status"]["conditions"][0]["status"] = "True"
    cluster.reconcile()
    assert cluster.said()["Progressing"] == "False Settled"
