"""Replicas whose gates are full: they get nothing more, requests wait for them, and are woken when there is room. No I/O."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from prefixpool import wire
from prefixpool.errors import RequestError
from prefixpool.wire import State
from prefixpool_router.dispatch import FleetDispatch, FleetDispatcher
from prefixpool_router.dispatch_types import FullError, Outcome, RoutedRequest
from prefixpool_router.explain import DecisionRing
from prefixpool_router.fleet import Fleet, FleetSettings
from prefixpool_router.knowledge import Knowledge
from prefixpool_router.membership import Member
from prefixpool_router.metrics import RoutingMetrics

BOUND = 3


class Pool:
    """Ready replicas with a bound, and how many were woken."""

    def __init__(self, *names: str) -> None:
        self.now = 100.0
        self.woken: list[int] = []
        metrics = RoutingMetrics(CollectorRegistry())
        self.fleet = Fleet(Knowledge(1 << 20), metrics, FleetSettings(), lambda: self.now)
        self.dispatcher = FleetDispatcher(self.fleet, metrics, DecisionRing(0), policy="prefix")
        self.dispatcher.when_room(self.woken.append)
        self.fleet.apply([Member(name=name, engine=f"http://{name}:1", agent=f"http://{name}:2") for name in names])
        for replica in self.fleet.replicas.values():
            replica.welcomed(wire.Welcome(replica=replica.name, epoch=1, block_tokens=16, max_inflight=BOUND, models=("m",)))
            replica.status_changed(wire.Status(state=State.READY, epoch=1))
        self.woken.clear()

    def send(self, *exclude: str, path: str = "/v1/embeddings", model: str = "m") -> FleetDispatch:
        body = {"model": model, "input": "x"}
        return self.dispatcher.dispatch(RoutedRequest(path=path, body=body), frozenset(exclude))


def test_full_replicas_are_left_out_until_all_are() -> None:
    pool = Pool("a", "b")
    places = [pool.send().replica for _ in range(2 * BOUND)]
    assert sorted(places) == ["a"] * BOUND + ["b"] * BOUND
    with pytest.raises(FullError):
        pool.send()


def test_an_ended_request_makes_room_and_wakes_as_many() -> None:
    pool = Pool("a")
    running = [pool.send() for _ in range(BOUND)]
    pool.woken.clear()
    running[0].finish(Outcome(status=200))
    assert set(pool.woken) == {1}
    running[1].finish(Outcome(status=200))
    assert max(pool.woken) == 2
    pool.send()


def test_requests_of_other_routers_take_places_and_give_them_back() -> None:
    pool = Pool("a")
    pool.fleet.replicas["a"].load_reported(wire.Load(inflight=BOUND))
    with pytest.raises(FullError):
        pool.send()
    pool.fleet.replicas["a"].load_reported(wire.Load(inflight=BOUND - 1))
    assert set(pool.woken) == {1}
    pool.send()


def test_what_is_no_work_goes_to_full_replicas_too() -> None:
    pool = Pool("a")
    for _ in range(BOUND):
        pool.send()
    for path in ("/tokenize", "/v1/models", "/v1/messages/count_tokens"):
        assert pool.send(path=path).replica == "a"


def test_a_busy_gate_is_believed_until_its_agents_next_report() -> None:
    pool = Pool("a")
    pool.send().abandon("busy", replica_down=False)
    with pytest.raises(FullError):
        pool.send()
    pool.fleet.replicas["a"].load_reported(wire.Load(inflight=0))
    assert pool.send().replica == "a"


def test_the_caller_is_told_to_wait_even_for_those_it_has_tried() -> None:
    pool = Pool("a", "b")
    pool.send("b").abandon("busy", replica_down=False)
    pool.send("a").abandon("busy", replica_down=False)
    with pytest.raises(FullError):
        pool.send("a", "b")


def test_nobody_waits_for_a_replica_that_is_out() -> None:
    pool = Pool("a")
    for _ in range(BOUND):
        pool.send()
    pool.woken.clear()
    pool.fleet.replicas["a"].went_down("refused")
    assert pool.woken, "those who wait must hear of it"
    with pytest.raises(RequestError) as refused:
        pool.send()
    assert not isinstance(refused.value, FullError)
    assert refused.value.status == 503


def test_a_full_replica_that_leaves_is_forgotten() -> None:
    pool = Pool("a")
    for _ in range(BOUND):
        pool.send()
    pool.fleet.apply([])
    with pytest.raises(RequestError) as refused:
        pool.send()
    assert not isinstance(refused.value, FullError)


def test_unknown_models_are_not_waited_for() -> None:
    pool = Pool("a")
    for _ in range(BOUND):
        pool.send()
    with pytest.raises(RequestError) as refused:
        pool.send(model="another")
    assert refused.value.status == 404


def test_without_an_agent_no_bound_is_known() -> None:
    pool = Pool("a")
    pool.fleet.replicas["a"].lost("gone")
    for _ in range(2 * BOUND):
        assert pool.send().replica == "a"
    pool.send().abandon("busy", replica_down=False)
    assert pool.send().replica == "a"
