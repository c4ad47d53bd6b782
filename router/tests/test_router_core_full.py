"""Replicas whose gates are full: they get nothing more, requests wait for them, and are woken when there is room. No I/O."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from prefixpool import wire
from prefixpool.errors import RequestError
from prefixpool.wire import State
from prefixpool_router.attempt import FleetDispatch
from prefixpool_router.dispatch import FleetDispatcher
from prefixpool_router.dispatch_types import NotYetError, Outcome, RoutedRequest
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
        self.now += self.fleet.settings.warmup_s
        self.woken.clear()

    def send(self, *exclude: str, path: str = "/v1/embeddings", model: str = "m") -> FleetDispatch:
        body = {"model": model, "input": "x"}
        return self.dispatcher.dispatch(RoutedRequest(path=path, body=body), frozenset(exclude))


def test_full_replicas_are_left_out_until_all_are() -> None:
    pool = Pool("a", "b")
    places = [pool.send().replica for _ in range(2 * BOUND)]
    assert sorted(places) == ["a"] * BOUND + ["b"] * BOUND
    with pytest.raises(NotYetError):
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
    with pytest.raises(NotYetError):
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
    with pytest.raises(NotYetError):
        pool.send()
    pool.fleet.replicas["a"].load_reported(wire.Load(inflight=0))
    assert pool.send().replica == "a"


def test_the_caller_is_told_to_wait_even_for_those_it_has_tried() -> None:
    pool = Pool("a", "b")
    pool.send("b").abandon("busy", replica_down=False)
    pool.send("a").abandon("busy", replica_down=False)
    with pytest.raises(NotYetError):
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
    assert not isinstance(refused.value, NotYetError)
    assert refused.value.status == 503


def test_a_full_replica_that_leaves_is_forgotten() -> None:
    pool = Pool("a")
    for _ in range(BOUND):
        pool.send()
    pool.fleet.apply([])
    with pytest.raises(RequestError) as refused:
        pool.send()
    assert not isinstance(refused.value, NotYetError)


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


# -- a router that has just started


def starting(*names: str) -> Pool:
    pool = Pool()
    pool.fleet.started_s = pool.now
    pool.fleet.known = bool(names)
    if names:
        pool.fleet.apply([Member(name=name, engine=f"http://{name}:1", agent=f"http://{name}:2") for name in names])
    return pool


@pytest.mark.parametrize("names", [(), ("a",)], ids=["no members yet", "no agent yet"])
@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/models"])
def test_requests_wait_until_a_new_router_knows_its_replicas(names: tuple[str, ...], path: str) -> None:
    pool = starting(*names)
    with pytest.raises(NotYetError):
        pool.send(path=path)
    pool.woken.clear()
    pool.fleet.apply([Member(name="a", engine="http://a:1", agent="http://a:2")])
    replica = pool.fleet.replicas["a"]
    replica.welcomed(wire.Welcome(replica="a", epoch=1, block_tokens=16, models=("m",)))
    replica.status_changed(wire.Status(state=State.READY, epoch=1))
    assert pool.woken
    assert pool.send(path=path).replica == "a"


def test_a_new_router_does_not_wait_for_engines_that_still_load() -> None:
    pool = starting("a")
    replica = pool.fleet.replicas["a"]
    replica.welcomed(wire.Welcome(replica="a", epoch=1, block_tokens=16, models=("m",)))
    replica.status_changed(wire.Status(state=State.STARTING, epoch=1, reason="loading"))
    with pytest.raises(RequestError) as refused:
        pool.send()
    assert not isinstance(refused.value, NotYetError)


def test_waiting_for_the_first_replica_ends_with_the_warm_up() -> None:
    pool = starting("a")
    with pytest.raises(NotYetError):
        pool.send()
    pool.woken.clear()
    pool.now += pool.fleet.settings.warmup_s
    pool.fleet.tick(0.0)
    assert pool.woken
    with pytest.raises(RequestError) as refused:
        pool.send()
    assert not isinstance(refused.value, NotYetError)


def test_a_pool_without_members_is_told_at_once() -> None:
    pool = starting()
    pool.fleet.apply([])
    with pytest.raises(RequestError) as refused:
        pool.send()
    assert not isinstance(refused.value, NotYetError)
