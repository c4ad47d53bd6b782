"""The resync: which pools look different from the last time."""

from __future__ import annotations

from typing import Any

import pytest

from prefixpool_operator import kube
from prefixpool_operator.changes import _WHOLE_ROUNDS, EVERYWHERE, Changes, owner
from prefixpool_operator.controller import PoolKey
from prefixpool_operator.identity import L_POOL
from prefixpool_operator.inventory import ClusterInventory
from prefixpool_operator.kube import ForbiddenError, NotFoundError, Resource, UnavailableError
from prefixpool_operator.observed import Raw
from prefixpool_testing.fake_kube import FakeKube

KINDS = (kube.STATEFUL_SET, kube.POD)


def changes(api: FakeKube, *namespaces: str) -> Changes:
    return Changes(api, ClusterInventory(api, fresh_s=-1, clock=lambda: 0), namespaces=namespaces or EVERYWHERE, kinds=KINDS)


def put_pod(api: FakeKube, name: str, pool: str) -> None:
    api.put(kube.POD, name, metadata={"labels": {L_POOL: pool, "app.kubernetes.io/managed-by": "prefixpool-operator"}})


async def settled(api: FakeKube, *namespaces: str) -> Changes:
    """After its first look, with many pools, so that the turn of `p` and `q` is not the next one."""
    for number in range(2 * _WHOLE_ROUNDS):
        api.put(kube.POOL, f"z{number:02}", namespace="z")
    made = changes(api, *namespaces)
    await made.pools()
    return made


async def test_the_first_look_finds_all_and_the_next_ones_what_changed() -> None:
    api = FakeKube()
    api.put(kube.POOL, "p")
    api.put(kube.POOL, "q", namespace="other")
    assert set(await changes(api).pools()) == {PoolKey("ns", "p"), PoolKey("other", "q")}


@pytest.mark.parametrize(
    "what", ["pod is new", "pod is gone", "pod changed", "pool changed", "pool is gone", "secret is gone"]
)
async def test_whatever_changed_is_found(what: str) -> None:
    api = FakeKube()
    api.put(kube.POOL, "p")
    put_pod(api, "p-0", "p")
    api.put(kube.SECRET, "p-keys", metadata={"labels": {L_POOL: "p"}})
    made = await settled(api)
    if what == "pod is new":
        put_pod(api, "p-1", "p")
    elif what == "pool changed":
        api.put(kube.POOL, "p", spec={"replicas": 2})
    elif what == "pod changed":
        put_pod(api, "p-0", "p")
    else:
        gone = {"pod": ("Pod", "p-0"), "pool": ("InferencePool", "p"), "secret": ("Secret", "p-keys")}
        kind, name = gone[what.split()[0]]
        del api.objects[kind, "ns", name]
    assert PoolKey("ns", "p") in await made.pools()


async def test_a_child_without_the_pools_label_belongs_to_its_owner() -> None:
    """Or a pool that somebody took the label from would not be looked at."""
    meta = {"namespace": "ns", "name": "p", "labels": {L_POOL: "other"}}
    reference = {"apiVersion": "prefixpool.dev/v1alpha1", "kind": "InferencePool", "name": "p", "controller": True}
    assert owner({"metadata": {**meta, "labels": None, "ownerReferences": [reference]}}) == PoolKey("ns", "p")
    assert owner({"metadata": {**meta, "ownerReferences": [reference]}}) == PoolKey("ns", "p")
    of_the_gateway = {**reference, "apiVersion": "inference.networking.k8s.io/v1"}
    assert owner({"metadata": {**meta, "ownerReferences": [of_the_gateway]}}) == PoolKey("ns", "other")


async def test_what_did_not_change_has_its_turn_all_the_same_once_in_a_while() -> None:
    api = FakeKube()
    made = await settled(api)
    rounds = [await made.pools() for _ in range(_WHOLE_ROUNDS)]
    assert all(len(looked) == 2 for looked in rounds)
    assert len({key for looked in rounds for key in looked}) == 2 * _WHOLE_ROUNDS


async def test_another_node_concerns_every_pool() -> None:
    """A pool that could not be sized waits for just that."""
    api = FakeKube()
    made = await settled(api)
    api.put(kube.NODE, "gpu-0", namespace="", metadata={"labels": {"nvidia.com/gpu.memory": "81920"}})
    assert len(await made.pools()) == 2 * _WHOLE_ROUNDS
    assert len(await made.pools()) == 2


async def test_an_outage_forgets_nothing() -> None:
    api = FakeKube()
    api.put(kube.POOL, "p")
    made = await settled(api)
    put_pod(api, "p-0", "p")
    api.fail = lambda verb, kind, name: UnavailableError("down") if kind == "Pod" else None
    with pytest.raises(UnavailableError):
        await made.pools()
    api.fail = lambda verb, kind, name: None
    assert PoolKey("ns", "p") in await made.pools()


async def test_only_the_namespaces_that_were_named_are_read() -> None:
    api = FakeKube()
    api.put(kube.POOL, "p", namespace="a")
    api.put(kube.POOL, "p", namespace="b")
    api.put(kube.POOL, "p", namespace="c")
    assert set(await changes(api, "a", "b").pools()) == {PoolKey("a", "p"), PoolKey("b", "p")}


async def test_a_cluster_without_the_kind_is_told_what_to_apply() -> None:
    api = FakeKube()
    api.fail = lambda verb, kind, name: NotFoundError("404 page not found", status=404) if kind == kube.POOL.kind else None
    with pytest.raises(NotFoundError, match=r"apply crds/.*404 page not found"):
        await changes(api).pools()


class Fenced(FakeKube):
    """With rights in some namespaces only, as they are left when others are deleted."""

    def __init__(self, *readable: str) -> None:
        super().__init__()
        self.readable = set(readable)

    async def list_all(self, resource: Resource, namespace: str = "", **how: Any) -> list[Raw]:
        if resource.namespaced and namespace not in self.readable:
            raise ForbiddenError(f"{resource.plural} is forbidden in the namespace {namespace}", status=403)
        return await super().list_all(resource, namespace, **how)


async def test_a_deleted_namespace_does_not_end_the_care_for_the_others() -> None:
    """The rights in it went with it."""
    api = Fenced("a", "b")
    for namespace in ("a", "b"):
        api.put(kube.POOL, "p", namespace=namespace)
    made = changes(api, "a", "b")
    assert set(await made.pools()) == {PoolKey("a", "p"), PoolKey("b", "p")}
    api.readable = {"a"}
    api.put(kube.POOL, "p", namespace="a", spec={"replicas": 2})
    assert await made.pools() == [PoolKey("a", "p")]
    assert await made.known() == ("a",)
    assert made.passed_over == {"b"}
    api.readable = {"a", "b"}
    assert PoolKey("b", "p") in await made.pools(), "somebody made it anew"


async def test_without_rights_anywhere_nothing_is_taken_for_listed() -> None:
    made = changes(Fenced(), "a", "b")
    with pytest.raises(ForbiddenError):
        await made.pools()
    with pytest.raises(ForbiddenError):
        await made.known()
