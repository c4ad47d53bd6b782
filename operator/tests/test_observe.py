"""What `plan()` gets to see."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping

import pytest

from prefixpool.wire import Info
from prefixpool_operator import kube
from prefixpool_operator.controller import PoolKey
from prefixpool_operator.identity import L_POOL
from prefixpool_operator.kube import ForbiddenError, UnavailableError
from prefixpool_operator.observe import Observer, unlisted
from prefixpool_operator.observed import Key, Node, Observed, Raw, Settings
from prefixpool_testing.fake_kube import FakeKube

KEY = PoolKey("ns", "p")
OURS = {"labels": {L_POOL: "p"}}
NOBODY: frozenset[Key] = frozenset()


class SilentAgents:
    """Nobody answers; keeps the key that was shown."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    async def infos(self, pods: Iterable[Raw], key: str) -> Mapping[str, Info]:
        self.keys.append(key)
        return {}


class NoNodes:
    async def nodes(self) -> tuple[Node, ...] | None:
        return None


class Rig:
    def __init__(self) -> None:
        self.api = FakeKube()
        self.api.put(kube.POOL, "p", spec={})
        self.agents = SilentAgents()
        self.observer = Observer(
            self.api,
            NoNodes(),
            self.agents,
            kinds=kube.CHILDREN,
            settings=Settings(worker_image="w", router_image="r"),
            now=lambda: 17.0,
        )

    async def look(self, suspects: frozenset[Key] = NOBODY) -> Observed:
        observed = await self.observer.observe(KEY, suspects)
        assert observed is not None
        return observed


async def test_a_pool_that_does_not_exist() -> None:
    rig = Rig()
    assert await rig.observer.observe(PoolKey("ns", "other"), NOBODY) is None


async def test_children_pods_and_claims_are_told_apart_by_label() -> None:
    rig = Rig()
    rig.api.put(kube.STATEFUL_SET, "p", metadata=OURS)
    rig.api.put(kube.STATEFUL_SET, "theirs", metadata={"labels": {L_POOL: "q"}})
    rig.api.put(kube.STATEFUL_SET, "p", namespace="elsewhere", metadata=OURS)
    rig.api.put(kube.POD, "p-0", metadata=OURS)
    rig.api.put(kube.CLAIM, "disk-p-0", metadata=OURS)
    observed = await rig.look()
    assert observed.children.keys() == {("StatefulSet", "p")}
    assert [pod["metadata"]["name"] for pod in observed.pods] == ["p-0"]
    assert [claim["metadata"]["name"] for claim in observed.claims] == ["disk-p-0"]
    assert observed.now_s == 17.0
    assert rig.agents.keys == [], "no key, no questions"


async def test_secrets_are_read_by_name_and_their_values_go_to_agents_only() -> None:
    rig = Rig()
    rig.api.put(kube.SECRET, "p-keys", metadata=OURS, data={"engine": "c2VzYW1l", "salt": "cGVwcGVy"})
    observed = await rig.look()
    assert observed.children["Secret", "p-keys"]["data"] == {"engine": "", "salt": ""}
    assert rig.agents.keys == ["sesame"]
    assert ("list", "Secret", f"{L_POOL}=p") not in rig.api.calls
    assert "c2VzYW1l" not in repr(observed)
    assert "sesame" not in repr(observed)


@pytest.mark.parametrize(
    ("content", "keys"), [("new\nold\n", ["new"]), ("\n", []), ("not \u00e4scii", []), ("two\rlines", ["two"])]
)
async def test_a_secret_with_an_old_key_behind_the_new_one_broke_every_look(content: str, keys: list[str]) -> None:
    rig = Rig()
    rig.api.put(kube.SECRET, "p-keys", metadata=OURS, data={"engine": base64.b64encode(content.encode()).decode()})
    await rig.look()
    assert rig.agents.keys == keys


async def test_a_secret_of_somebody_else_opens_nothing() -> None:
    rig = Rig()
    rig.api.put(kube.SECRET, "p-keys", data={"engine": "c2VzYW1l"})
    observed = await rig.look()
    assert observed.taken == {("Secret", "p-keys")}
    assert observed.children == {}
    assert rig.agents.keys == []


def stuck(rig: Rig) -> None:
    unmade = {"conditions": [{"type": "PodReadyToStartContainers", "status": "False"}]}
    rig.api.put(kube.POD, "p-0", metadata={**OURS, "uid": "stuck"}, spec={"nodeName": "n"}, status=unmade)
    rig.api.put(kube.POD, "p-1", metadata={**OURS, "uid": "fine"}, spec={"nodeName": "n"}, status={})
    for name, uid in (("a", "stuck"), ("b", "fine")):
        rig.api.put(kube.EVENT, name, involvedObject={"uid": uid}, type="Warning", message=f"of {uid}")


async def test_warnings_are_read_of_what_does_not_come_up_only() -> None:
    rig = Rig()
    rig.api.put(kube.POD, "p-2", metadata=OURS)
    assert (await rig.look()).warnings == ()
    assert not [call for call in rig.api.calls if call[1] == "Event"]
    stuck(rig)
    assert [one["message"] for one in (await rig.look()).warnings] == ["of stuck"]
    rig.api.put(kube.STATEFUL_SET, "p", metadata={**OURS, "uid": "fine"}, spec={"replicas": 2}, status={"replicas": 2})
    rig.api.put(kube.resource_of("Job"), "p-inspect", metadata={**OURS, "uid": "fine"}, status={"active": 1})
    assert [one["message"] for one in (await rig.look()).warnings] == ["of stuck"]
    rig.api.put(kube.STATEFUL_SET, "p", metadata={**OURS, "uid": "fine"}, spec={"replicas": 3}, status={"replicas": 2})
    assert [one["message"] for one in (await rig.look()).warnings] == ["of fine", "of stuck"]


async def test_without_the_right_to_read_events_all_else_goes_on() -> None:
    rig = Rig()
    stuck(rig)
    rig.api.fail = lambda verb, kind, name: ForbiddenError("no right") if kind == "Event" else None
    observed = await rig.look()
    assert (len(observed.pods), observed.warnings) == (2, ())


async def test_while_events_cannot_be_read_pools_are_looked_after_and_say_what_they_said() -> None:
    """Events may have a store of their own: while it was away, every look at a pool with a stuck pod failed."""
    rig = Rig()
    stuck(rig)
    rig.api.fail = lambda verb, kind, name: UnavailableError("500") if kind == "Event" else None
    assert (await rig.look()).warnings == ()
    rig.api.fail = lambda verb, kind, name: None
    await rig.look()
    rig.api.fail = lambda verb, kind, name: UnavailableError("500") if kind == "Event" else None
    assert [one["message"] for one in (await rig.look()).warnings] == ["of stuck"]


async def test_names_that_were_taken_are_looked_at_again() -> None:
    rig = Rig()
    rig.api.put(kube.resource_of("Service"), "p")
    suspects = frozenset({("Service", "p"), ("ConfigMap", "p-config")})
    assert (await rig.look(suspects)).taken == {("Service", "p")}
    del rig.api.objects["Service", "ns", "p"]
    assert (await rig.look(suspects)).taken == NOBODY


OWNER = {"apiVersion": "prefixpool.dev/v1alpha1", "kind": "InferencePool", "name": "p", "controller": True}


async def test_a_child_whose_label_was_removed_is_not_taken_but_ours() -> None:
    rig = Rig()
    uid = rig.api.objects["InferencePool", "ns", "p"]["metadata"]["uid"]
    rig.api.put(kube.STATEFUL_SET, "p", metadata={"ownerReferences": [{**OWNER, "uid": uid}]})
    observed = await rig.look(frozenset({("StatefulSet", "p")}))
    assert observed.taken == NOBODY
    assert observed.children.keys() == {("StatefulSet", "p")}
    assert unlisted(observed) == {("StatefulSet", "p")}


async def test_a_child_of_a_former_pool_of_the_same_name_without_label_is_taken() -> None:
    rig = Rig()
    rig.api.put(kube.STATEFUL_SET, "p", metadata={"ownerReferences": [{**OWNER, "uid": "before"}]})
    assert (await rig.look(frozenset({("StatefulSet", "p")}))).taken == {("StatefulSet", "p")}


async def test_the_keys_whose_label_was_removed_are_still_ours() -> None:
    rig = Rig()
    uid = rig.api.objects["InferencePool", "ns", "p"]["metadata"]["uid"]
    rig.api.put(kube.SECRET, "p-keys", metadata={"ownerReferences": [{**OWNER, "uid": uid}]}, data={"engine": "c2VzYW1l"})
    observed = await rig.look(frozenset({("Secret", "p-keys")}))
    assert observed.taken == NOBODY
    assert observed.children["Secret", "p-keys"]["data"] == {"engine": ""}
    assert rig.agents.keys == ["sesame"]


@pytest.mark.parametrize("error", [UnavailableError("down"), ForbiddenError("no right")])
async def test_a_list_that_failed_is_never_an_empty_one(error: Exception) -> None:
    rig = Rig()
    rig.api.fail = lambda verb, kind, name: error if (verb, kind) == ("list", "Pod") else None
    with pytest.raises(type(error)):
        await rig.look()
