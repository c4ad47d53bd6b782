"""Actions are carried out as planned, by a leader only."""

from __future__ import annotations

import asyncio
import base64

import pytest
from prometheus_client import CollectorRegistry

from prefixpool_operator import kube
from prefixpool_operator.actions import Action, Apply, CreateOnce, Delete, FillReplicas, PatchImage
from prefixpool_operator.apply import Applier
from prefixpool_operator.election import LeadershipLostError
from prefixpool_operator.identity import L_POOL
from prefixpool_operator.kube import ConflictError, ForbiddenError, KubeError
from prefixpool_operator.metrics import OperatorMetrics
from prefixpool_operator.observed import Raw
from prefixpool_testing.fake_kube import FakeKube

SERVICE = kube.resource_of("Service")


def config(name: str = "p-config", **data: str) -> Raw:
    meta = {"name": name, "namespace": "ns", "labels": {L_POOL: "p"}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": data}


class Rig:
    def __init__(self) -> None:
        self.api = FakeKube()
        self.pool = self.api.put(kube.POOL, "p", spec={})
        self.api.calls.clear()
        self.leads = True
        self.registry = CollectorRegistry()
        self.applier = Applier(
            self.api, leads=lambda: self.leads, secret=lambda: "fresh", metrics=OperatorMetrics(self.registry)
        )

    async def do(self, *actions: Action) -> frozenset[tuple[str, str]]:
        return await self.applier.apply(self.pool, actions)

    def counted(self, what: str, action: str, kind: str) -> float | None:
        name = f"prefixpool_operator_{what}_total"
        return self.registry.get_sample_value(name, {"action": action, "kind": kind})


async def test_a_child_is_applied_and_counted() -> None:
    rig = Rig()
    assert await rig.do(Apply(object=config(a="1"), reason="spec changed")) == frozenset()
    assert rig.api.objects["ConfigMap", "ns", "p-config"]["data"] == {"a": "1"}
    assert rig.counted("actions", "Apply", "ConfigMap") == 1


def service(name: str, pool: str) -> Apply:
    meta = {"name": name, "namespace": "ns", "labels": {L_POOL: pool}}
    return Apply(object={"apiVersion": "v1", "kind": "Service", "metadata": meta}, absent=True, reason="new")


async def test_a_name_that_somebody_else_has_is_left_alone_and_told() -> None:
    rig = Rig()
    rig.api.put(SERVICE, "p", metadata={"labels": {"app": "theirs"}}, spec={"ports": []})
    foreign = await rig.do(Apply(object=config(), absent=True, reason="new"), service("p", "p"))
    assert foreign == {("Service", "p")}
    assert rig.api.objects["Service", "ns", "p"]["metadata"]["labels"] == {"app": "theirs"}
    assert rig.counted("actions", "Apply", "ConfigMap") is None, "nothing is done by halves"


async def test_a_name_that_somebody_takes_at_the_last_moment_is_left_alone_and_told() -> None:
    rig = Rig()
    rig.api.fail = lambda verb, kind, name: ConflictError("owned by kubectl") if verb == "apply" else None
    assert await rig.do(service("p", "p")) == {("Service", "p")}
    assert not rig.api.forced, "an apply by force would have taken it"


async def test_pools_made_at_the_same_moment_that_need_one_name_do_not_share_it() -> None:
    """Pool `a`'s Service `a-replicas` and the client Service of a pool called `a-replicas`."""
    rig = Rig()
    both = (service("a-replicas", "a"), service("a-replicas", "a-replicas"))
    surprised = await asyncio.gather(*map(rig.do, both))
    assert sorted(map(len, surprised)) == [0, 1]
    assert rig.counted("actions", "Apply", "Service") == 1
    later = await asyncio.gather(*map(rig.do, both))
    assert later == [{("Service", "a-replicas")}] * 2, "it is there now"


async def test_a_child_of_another_pool_is_somebody_elses() -> None:
    """Pool `a`'s Service `a-replicas` and the client Service of a pool called `a-replicas` have one name."""
    rig = Rig()
    rig.api.put(kube.resource_of("ConfigMap"), "p-config", metadata={"labels": {L_POOL: "other"}})
    assert await rig.do(Apply(object=config(), absent=True, reason="new")) == {("ConfigMap", "p-config")}


async def test_the_secret_gets_fresh_keys_and_is_never_written_again() -> None:
    rig = Rig()
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "p-keys", "namespace": "ns"}, "type": "Opaque"}
    create = CreateOnce(object=secret, random_keys=("engine", "salt"), reason="new")
    await rig.do(create)
    fresh = base64.b64encode(b"fresh").decode()
    assert rig.api.objects["Secret", "ns", "p-keys"]["data"] == {"engine": fresh, "salt": fresh}
    rig.api.objects["Secret", "ns", "p-keys"]["data"]["engine"] = "b2xk"
    await rig.do(create)
    assert rig.api.objects["Secret", "ns", "p-keys"]["data"]["engine"] == "b2xk"


async def test_a_pod_is_deleted_only_if_it_is_the_one_that_was_meant() -> None:
    rig = Rig()
    pod = rig.api.put(kube.POD, "p-0")

    def delete(uid: str) -> Delete:
        return Delete(api_version="v1", kind="Pod", name="p-0", uid=uid, reason="outdated")

    await rig.do(delete("its predecessor's"))
    assert ("Pod", "ns", "p-0") in rig.api.objects
    await rig.do(delete(pod["metadata"]["uid"]))
    assert ("Pod", "ns", "p-0") not in rig.api.objects
    await rig.do(delete(pod["metadata"]["uid"]))  # gone already: as wanted


async def test_a_router_image_is_patched_with_its_annotations_into_one_pod() -> None:
    rig = Rig()
    pod = rig.api.put(kube.POD, "p-0", spec={"containers": [{"name": "worker"}]})
    patch = PatchImage(
        pod="p-0", uid=pod["metadata"]["uid"], container="router", image="new", annotations={"a": "b"}, reason="image"
    )
    await rig.do(patch)
    patched = rig.api.objects["Pod", "ns", "p-0"]
    assert patched["spec"]["initContainers"] == [{"name": "router", "image": "new"}]
    assert patched["metadata"]["annotations"] == {"a": "b"}


async def test_replicas_that_somebody_else_owns_stay_theirs() -> None:
    rig = Rig()
    rig.api.fail = lambda verb, kind, name: ConflictError("owned by kubectl") if verb == "apply" else None
    await rig.do(FillReplicas(replicas=3, reason="kvBudget"))
    assert rig.counted("action_failures", "FillReplicas", "InferencePool") is None


async def test_the_first_refusal_ends_it_and_is_counted() -> None:
    rig = Rig()
    rig.api.fail = lambda verb, kind, name: ForbiddenError("quota") if name == "b" else None
    with pytest.raises(ForbiddenError):
        await rig.do(*(Apply(object=config(name), reason="new") for name in "abc"))
    assert [name for verb, _, name in rig.api.calls if verb == "apply"] == ["a", "b"]
    assert rig.counted("action_failures", "Apply", "ConfigMap") == 1


async def test_who_no_longer_leads_writes_nothing() -> None:
    rig = Rig()
    rig.leads = False
    with pytest.raises(LeadershipLostError):
        await rig.do(Apply(object=config(), reason="new"))
    with pytest.raises(LeadershipLostError):
        await rig.applier.write_status(rig.pool, {})
    assert rig.api.writes == []


async def test_a_pool_that_was_deleted_meanwhile_is_not_made_anew() -> None:
    rig = Rig()
    del rig.api.objects["InferencePool", "ns", "p"]
    await rig.do(FillReplicas(replicas=3, reason="kvBudget"))
    with pytest.raises(KubeError):
        await rig.applier.write_status(rig.pool, {"replicas": 1})
    assert rig.api.objects == {}
