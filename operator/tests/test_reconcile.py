"""One reconcile: what is planned is done, and told only when there is news."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from prefixpool.wire import Info
from prefixpool_operator import kube
from prefixpool_operator.actions import Apply, Event, EventType, Plan
from prefixpool_operator.apply import Applier
from prefixpool_operator.controller import Outcome, PoolKey
from prefixpool_operator.events import EventPoster
from prefixpool_operator.identity import L_POOL
from prefixpool_operator.kube import InvalidError, KubeError, UnavailableError
from prefixpool_operator.metrics import OperatorMetrics
from prefixpool_operator.observe import Observer
from prefixpool_operator.observed import Node, Observed, Raw, Settings
from prefixpool_operator.reconcile import Reconciler
from prefixpool_testing.fake_kube import FakeKube

KEY = PoolKey("ns", "p")
SERVICE = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "p", "namespace": "ns", "labels": {L_POOL: "p"}}}
NEWS = Event(type=EventType.NORMAL, reason="News", message="something")


class Nobody:
    async def infos(self, pods: Iterable[Raw], key: str) -> Mapping[str, Info]:
        return {}

    async def nodes(self) -> tuple[Node, ...] | None:
        return None


class Rig:
    def __init__(self, **planned: Any) -> None:
        self.api = FakeKube()
        self.pool = self.api.put(kube.POOL, "p", spec={})
        self.seen: list[Observed] = []
        self.planned = planned
        observer = Observer(
            self.api,
            Nobody(),
            Nobody(),
            kinds=kube.CHILDREN,
            settings=Settings(worker_image="w", router_image="r"),
            now=lambda: 0,
        )
        applier = Applier(self.api, leads=lambda: True, secret=lambda: "s", metrics=OperatorMetrics(CollectorRegistry()))
        self.reconciler = Reconciler(observer, self.plan, applier, EventPoster(self.api, leads=lambda: True, now=lambda: 0))
        self.api.calls.clear()

    def plan(self, observed: Observed) -> Plan:
        self.seen.append(observed)
        return Plan(**{"status": {"replicas": 1}, "status_changed": False, **self.planned})

    async def reconcile(self) -> Outcome:
        return await self.reconciler.reconcile(KEY)

    def wrote(self) -> list[tuple[str, str]]:
        return [(verb, kind) for verb, kind, _ in self.api.writes]


async def test_without_news_nothing_is_written() -> None:
    rig = Rig(wake_after_s=7.0)
    assert await rig.reconcile() == Outcome(wake_after_s=7.0)
    assert rig.wrote() == []


async def test_actions_then_status_then_events() -> None:
    rig = Rig(actions=(Apply(object=SERVICE, reason="new"),), status_changed=True, events=(NEWS,))
    await rig.reconcile()
    assert rig.wrote() == [("apply", "Service"), ("apply status", "InferencePool"), ("create", "Event")]
    assert rig.api.objects["InferencePool", "ns", "p"]["status"] == {"replicas": 1}


async def test_a_pool_that_is_gone() -> None:
    rig = Rig()
    del rig.api.objects["InferencePool", "ns", "p"]
    assert await rig.reconcile() == Outcome(gone=True)
    assert rig.seen == []


async def test_a_refused_action_is_told_and_the_status_is_written_all_the_same() -> None:
    rig = Rig(actions=(Apply(object=SERVICE, reason="new"),), status_changed=True)
    rig.api.fail = lambda verb, kind, name: InvalidError("spec.ports: required") if verb == "apply" else None
    for _ in range(2):
        with pytest.raises(InvalidError):
            await rig.reconcile()
    assert rig.api.objects["InferencePool", "ns", "p"]["status"] == {"replicas": 1}
    rig.api.fail = lambda verb, kind, name: None
    assert await rig.reconcile() == Outcome(wake_after_s=0.0), "the status is to say that it is over"
    assert await rig.reconcile() == Outcome()
    assert [observed.refused for observed in rig.seen] == ["", "spec.ports: required", "spec.ports: required", ""]


async def test_a_name_that_is_taken_is_planned_with_at_once_and_given_up_when_it_is_free() -> None:
    rig = Rig(actions=(Apply(object=SERVICE, absent=True, reason="new"),))
    rig.api.put(kube.resource_of("Service"), "p")
    assert await rig.reconcile() == Outcome(wake_after_s=0.0)
    rig.planned = {}
    await rig.reconcile()
    assert [observed.taken for observed in rig.seen] == [frozenset(), {("Service", "p")}]
    del rig.api.objects["Service", "ns", "p"]
    await rig.reconcile()
    assert rig.seen[-1].taken == frozenset()


async def test_what_was_planned_without_a_child_that_lost_its_label_is_not_told() -> None:
    rig = Rig(actions=(Apply(object=SERVICE, absent=True, reason="new"),), status_changed=True, events=(NEWS,))
    owner = {"kind": "InferencePool", "name": "p", "uid": rig.pool["metadata"]["uid"], "controller": True}
    unlabelled = rig.api.put(kube.resource_of("Service"), "p", metadata={"ownerReferences": [owner]})
    rig.api.calls.clear()
    assert await rig.reconcile() == Outcome(wake_after_s=0.0)
    assert rig.wrote() == []
    rig.planned = {}
    for _ in range(2):  # also after the plan left it as it is, because somebody insists
        assert await rig.reconcile() == Outcome()
        assert rig.seen[-1].children["Service", "p"] == unlabelled


async def test_a_webhook_that_is_down_is_told_of_in_the_status() -> None:
    """It is answered with 500, and each try ended without a word: the status stood as it was before, for ever."""
    down = UnavailableError('500: failed calling webhook "v.example": connection refused', status=500)
    rig = Rig(actions=(Apply(object=SERVICE, reason="new"),), status_changed=True)
    rig.api.fail = lambda verb, kind, name: down if verb == "apply" else None
    for _ in range(2):
        with pytest.raises(UnavailableError):
            await rig.reconcile()
    assert rig.api.objects["InferencePool", "ns", "p"]["status"] == {"replicas": 1}
    assert [observed.refused for observed in rig.seen] == ["", str(down)]


async def test_a_server_that_is_not_well_is_no_refusal() -> None:
    rig = Rig(actions=(Apply(object=SERVICE, reason="new"),), status_changed=True)
    errors = [UnavailableError("no answer"), UnavailableError("429: too many requests", status=429)]
    rig.api.fail = lambda verb, kind, name: errors.pop() if verb == "apply" else None
    while errors:
        with pytest.raises(UnavailableError):
            await rig.reconcile()
    assert [observed.refused for observed in rig.seen] == ["", ""]


async def test_what_was_not_done_is_not_told_in_events() -> None:
    """Again with every try: that pods are deleted, while a quota refused what comes first."""
    deed = Event(type=EventType.NORMAL, reason="ReplacingPod", message="Deleting p-0")
    rig = Rig(actions=(Apply(object=SERVICE, reason="new"),), done=(deed,), events=(NEWS,))
    rig.api.fail = lambda verb, kind, name: InvalidError("exceeded quota") if verb == "apply" else None
    with pytest.raises(KubeError):
        await rig.reconcile()
    assert [obj["reason"] for (kind, _, _), obj in rig.api.objects.items() if kind == "Event"] == ["News"]
    rig.api.fail = lambda verb, kind, name: None
    await rig.reconcile()
    assert {obj["reason"] for (kind, _, _), obj in rig.api.objects.items() if kind == "Event"} == {"News", "ReplacingPod"}
