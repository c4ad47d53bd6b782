"""Verdicts: which replicas are used, how their caches are known, and why. No I/O; the clock is a number."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from prefixpool import wire
from prefixpool.errors import RequestError, WireError
from prefixpool.wire import Mode, State, Tier
from prefixpool_router.dispatch_types import EngineKeyError
from prefixpool_router.fleet import Fleet, FleetSettings
from prefixpool_router.knowledge import Knowledge
from prefixpool_router.membership import Member, MemberState
from prefixpool_router.metrics import RoutingMetrics
from prefixpool_router.reach import KEY_REFUSED, LOST_S
from prefixpool_router.replica import Replica
from prefixpool_router.state import replica_report

HASHES = array("Q", [11, 22, 33])
DEPTHS = array("I", [64, 128, 192])


class World:
    """A fleet with a clock that the test turns."""

    def __init__(self, **settings: Any) -> None:
        self.now = 100.0
        self.registry = CollectorRegistry()
        self.metrics = RoutingMetrics(self.registry)
        self.knowledge = Knowledge(64 << 20)
        self.fleet = Fleet(self.knowledge, self.metrics, FleetSettings(**settings), lambda: self.now)

    def join(self, name: str, *, agent: bool = True, state: MemberState = MemberState.READY) -> Replica:
        members = [replica.member for replica in self.fleet.replicas.values()]
        agent_url = f"http://{name}:2" if agent else None
        self.fleet.apply([*members, Member(name=name, engine=f"http://{name}:1", agent=agent_url, state=state)])
        return self.fleet.replicas[name]

    def verdict(self, name: str = "a") -> tuple[bool, Mode, str]:
        usable, mode, why, mode_why = self.fleet.verdict(name)
        return usable, mode, why or mode_why

    def depth(self, replica: Replica) -> int:
        levels = self.knowledge.walk(HASHES, 16).levels
        return max((level.tokens for level in levels if level.held & replica.candidate.bit), default=0)

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.fleet.tick(0.0)

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"prefixpool_router_{name}", labels)


@pytest.fixture
def world() -> World:
    return World()


def greet(replica: Replica, *, epoch: int = 1, models: tuple[str, ...] = (), state: State = State.READY) -> None:
    replica.welcomed(wire.Welcome(replica=replica.name, epoch=epoch, block_tokens=16, device_tokens=1000, models=models))
    replica.status_changed(wire.Status(state=state, epoch=epoch))


def picture(replica: Replica, *, epoch: int = 1) -> None:
    replica.snapshot_begins(wire.SnapshotBegin(epoch=epoch))
    replica.published(Tier.DEVICE, HASHES, DEPTHS)
    replica.snapshot_ended(wire.SnapshotEnd(epoch=epoch))


def precise(world: World, name: str = "a") -> Replica:
    replica = world.join(name)
    greet(replica)
    picture(replica)
    return replica


# -- usable


def test_a_request_that_was_answered_401_costs_no_replica_before_a_probe_was(world: World) -> None:
    """Clients choose what they ask for, and engines may open some of it to others than us."""
    replica = precise(world)
    replica.reach.doubt_key()
    assert world.verdict() == (True, Mode.PRECISE, "")
    replica.refused_key()
    usable, _, why = world.verdict()
    assert not usable
    assert "--engine-key-file" in why
    assert replica_report(world.fleet, replica).key_refused
    assert world.depth(replica) == 192, "its cache is what it was"
    world.later(LOST_S)
    assert not replica.out_of_reach, "what runs there goes on"
    replica.status_changed(wire.Status(state=State.READY, epoch=1))
    assert not world.verdict()[0], "its agent knows nothing of our key"
    replica.came_up()
    assert world.verdict() == (True, Mode.PRECISE, "")


def test_a_pool_whose_engines_all_refuse_the_key_says_so_to_clients(world: World) -> None:
    for name in ("a", "b"):
        precise(world, name).refused_key()
    with pytest.raises(EngineKeyError):
        world.fleet.eligible("m", ())
    assert world.metric("refusals_total", cause="key_refused") == 1
    world.fleet.replicas["b"].went_down("refused")
    with pytest.raises(RequestError) as caught:
        world.fleet.eligible("m", ())
    assert caught.value.status == 503, "b may be back at any moment"


def test_a_starting_router_does_not_wait_for_a_replica_that_refuses_its_key(world: World) -> None:
    world.join("a").refused_key()
    assert world.fleet.readiness("") == (False, f"no usable replica: a: {KEY_REFUSED}")
    with pytest.raises(EngineKeyError):
        world.fleet.eligible("m", ())


def test_a_replica_with_an_agent_is_used_once_its_engine_is_ready(world: World) -> None:
    replica = world.join("a")
    assert world.verdict() == (False, Mode.APPROXIMATE, "not seen answering yet; agent not reached yet")
    greet(replica, state=State.STARTING)
    assert world.verdict()[0] is False
    assert len(world.fleet.candidates) == 0
    replica.status_changed(wire.Status(state=State.READY, epoch=1))
    assert world.verdict()[0] is True
    assert [c.name for c in world.fleet.candidates] == ["a"]


@pytest.mark.parametrize("state", [State.STARTING, State.FENCED, State.STOPPED, State.FAILED])
def test_no_other_state_of_the_engine_gets_requests(world: World, state: State) -> None:
    replica = precise(world)
    replica.status_changed(wire.Status(state=state, epoch=1, reason="told so"))
    assert world.verdict() == (False, Mode.PRECISE, f"engine is {state}: told so")
    assert len(world.fleet.candidates) == 0


@pytest.mark.parametrize("state", [MemberState.NOT_READY, MemberState.TERMINATING])
def test_the_membership_can_take_a_replica_out(world: World, state: MemberState) -> None:
    replica = precise(world)
    world.fleet.apply([Member(name="a", engine="http://a:1", agent="http://a:2", state=state)])
    assert world.verdict()[0] is False
    assert world.fleet.replicas["a"] is replica
    world.fleet.apply([Member(name="a", engine="http://a:1", agent="http://a:2")])
    assert world.verdict() == (True, Mode.PRECISE, "")


def test_refused_connections_exclude_before_the_next_pick_and_drop_affinity(world: World) -> None:
    replica = world.join("a", agent=False)
    replica.came_up()
    history = replica.pictures.in_use(Mode.APPROXIMATE)
    assert history is not None
    history.promise(HASHES, lambda known: DEPTHS[known:], world.now + 300)
    assert world.depth(replica) == 192
    replica.went_down("refused")
    assert len(world.fleet.candidates) == 0
    assert world.verdict()[2] == "down: refused"
    replica.came_up()
    assert world.verdict()[0] is True
    assert world.depth(replica) == 0


def test_down_holds_until_a_probe_or_a_new_epoch(world: World) -> None:
    replica = precise(world)
    replica.went_down("refused")
    replica.status_changed(wire.Status(state=State.READY, epoch=1))  # the agent has not noticed yet
    assert world.verdict()[0] is False
    assert replica.needs_probe
    replica.status_changed(wire.Status(state=State.READY, epoch=2))
    assert world.verdict()[0] is True


def test_an_engine_is_out_of_reach_once_it_has_answered_nobody_for_a_while(world: World) -> None:
    replica = precise(world)
    replica.status_changed(wire.Status(state=State.STARTING, epoch=1, reason="/health did not answer"))
    world.later(LOST_S / 2)
    assert not replica.out_of_reach
    replica.load_reported(wire.Load())
    world.later(LOST_S / 2)
    assert replica.out_of_reach
    replica.status_changed(wire.Status(state=State.READY, epoch=1))
    assert not replica.out_of_reach
    replica.went_down("reset")
    world.later(LOST_S)
    assert replica.out_of_reach
    replica.came_up()
    assert not replica.out_of_reach


def test_a_replica_that_is_on_its_way_out_is_not_out_of_reach(world: World) -> None:
    replica = precise(world)
    world.join("b")
    replica.status_changed(wire.Status(state=State.FENCED, epoch=1))
    world.fleet.apply([Member(name="a", engine="http://a:1", agent="http://a:2", state=MemberState.TERMINATING)])
    world.later(2 * LOST_S)
    assert not world.fleet.verdict("a").usable
    assert not replica.out_of_reach
    replica.lost("its agent ended first")
    world.later(2 * LOST_S)
    assert not replica.out_of_reach


def test_a_fence_met_by_a_request_counts_for_a_second_without_an_agent(world: World) -> None:
    replica = world.join("a", agent=False)
    replica.came_up()
    replica.was_fenced()
    assert world.verdict()[2] == "it refused a request: fenced or stopping"
    world.later(1.1)
    assert world.verdict()[0] is True


def test_an_agent_that_restarts_costs_no_request(world: World) -> None:
    replica = precise(world)
    replica.lost("connection reset")
    assert world.verdict()[0] is True
    replica.welcomed(wire.Welcome(replica="a", epoch=1, block_tokens=16))
    assert world.verdict()[0] is True  # before its first Status


def test_a_returning_agent_that_has_not_seen_its_engine_yet_costs_no_request(world: World) -> None:
    replica = precise(world)
    replica.lost("killed")
    replica.welcomed(wire.Welcome(replica="a", epoch=0, block_tokens=16))
    replica.status_changed(wire.Status(state=State.STARTING, epoch=0, reason="the agent has just started"))
    assert world.verdict()[0] is True
    assert replica.needs_probe
    replica.lost("models are known now: connect again")
    replica.welcomed(wire.Welcome(replica="a", epoch=1, block_tokens=16))
    replica.status_changed(wire.Status(state=State.READY, epoch=1))
    assert world.verdict()[0] is True


def test_the_empty_picture_of_an_agent_without_engine_is_no_news(world: World) -> None:
    replica = precise(world)
    replica.lost("killed")
    replica.welcomed(wire.Welcome(replica="a", epoch=0, block_tokens=16))
    replica.snapshot_begins(wire.SnapshotBegin(epoch=0))
    replica.snapshot_ended(wire.SnapshotEnd(epoch=0))
    assert world.verdict()[:2] == (True, Mode.APPROXIMATE)
    assert world.depth(replica) == 192
    picture(replica)
    assert world.verdict() == (True, Mode.PRECISE, "")


def test_but_not_for_long(world: World) -> None:
    replica = precise(world)
    replica.lost("killed")
    replica.welcomed(wire.Welcome(replica="a", epoch=1, block_tokens=16))
    replica.status_changed(wire.Status(state=State.STARTING, epoch=1, reason="no answer"))
    world.later(5.1)
    assert world.verdict()[2] == "engine is starting: no answer"


@pytest.mark.parametrize("state", [State.FENCED, State.STOPPED, State.FAILED])
def test_and_not_against_its_word(world: World, state: State) -> None:
    replica = precise(world)
    replica.lost("killed")
    replica.welcomed(wire.Welcome(replica="a", epoch=1, block_tokens=16))
    replica.status_changed(wire.Status(state=state, epoch=1))
    assert world.verdict()[0] is False
    replica.lost("again")
    assert world.verdict()[0] is False


def test_an_engine_that_dies_under_a_living_agent_is_out_at_once(world: World) -> None:
    replica = precise(world)
    world.later(6)
    replica.status_changed(wire.Status(state=State.STARTING, epoch=1, reason="the engine ended"))
    assert world.verdict()[0] is False


def test_an_engine_that_restarted_meanwhile_waits_for_its_agents_word(world: World) -> None:
    replica = precise(world)
    replica.lost("connection reset")
    replica.welcomed(wire.Welcome(replica="a", epoch=2, block_tokens=16))
    assert world.verdict()[0] is False


def test_the_agent_of_another_replica_at_the_same_address_is_refused(world: World) -> None:
    replica = world.join("a")
    with pytest.raises(WireError, match="agent of 'b'"):
        replica.welcomed(wire.Welcome(replica="b", epoch=1))


# -- mode


def test_precise_needs_a_whole_picture(world: World) -> None:
    replica = world.join("a")
    greet(replica)
    assert world.verdict() == (True, Mode.APPROXIMATE, "its agent has sent no picture yet")
    replica.snapshot_begins(wire.SnapshotBegin(epoch=1))
    assert world.verdict() == (True, Mode.PRECISE, "warming")
    replica.published(Tier.DEVICE, HASHES, DEPTHS)
    assert world.depth(replica) == 0  # half a picture is not believed
    replica.snapshot_ended(wire.SnapshotEnd(epoch=1))
    assert world.verdict() == (True, Mode.PRECISE, "")
    assert world.depth(replica) == 192


def test_a_new_snapshot_forgets_at_once(world: World) -> None:
    replica = precise(world)
    replica.snapshot_begins(wire.SnapshotBegin(epoch=1, reason="cache reset"))
    assert world.depth(replica) == 0
    replica.snapshot_ended(wire.SnapshotEnd(epoch=1))
    assert world.depth(replica) == 0
    while world.knowledge.index.sweep():
        pass
    assert len(world.knowledge.index) == 0


@pytest.mark.parametrize(
    ("break_it", "why"),
    [
        (lambda replica: replica.lost("agent silent for 2.5 s"), "agent silent for 2.5 s"),
        (
            lambda replica: replica.status_changed(
                wire.Status(state=State.READY, epoch=1, mode=Mode.APPROXIMATE, reason="no KV events for 5 s")
            ),
            "its agent is approximate: no KV events for 5 s",
        ),
    ],
)
def test_what_is_not_precise_says_why_in_state_and_metric(
    world: World, break_it: Callable[[Replica], None], why: str
) -> None:
    replica = precise(world)
    break_it(replica)
    assert world.verdict() == (True, Mode.APPROXIMATE, why)
    world.fleet.measure()
    assert world.metric("replica_mode", replica="a", mode="approximate") == 1
    assert world.metric("replica_mode", replica="a", mode="precise") == 0
    assert (world.metric("replica_mode_changes_total", replica="a", mode="approximate") or 0) >= 1


def test_the_last_picture_of_a_lost_agent_is_history_for_a_while(world: World) -> None:
    replica = precise(world)
    replica.lost("agent silent for 2.5 s")
    assert world.depth(replica) == 192
    world.later(299)
    assert world.depth(replica) == 192
    world.later(2)
    assert world.depth(replica) == 0
    assert world.verdict()[:2] == (True, Mode.APPROXIMATE)


def test_without_history_there_is_only_load() -> None:
    world = World(history_ttl_s=0)
    replica = world.join("a", agent=False)
    replica.came_up()
    assert world.verdict() == (True, Mode.NONE, "no agent")
    assert replica.candidate.bit == 0


def test_a_drifting_picture_is_replaced_by_history_and_comes_back(world: World) -> None:
    replica = precise(world)
    for _ in range(20):
        replica.pictures.facts_trust.observe(1000, 0, 16)
    world.fleet.judge(replica)
    usable, mode, why = world.verdict()
    assert (usable, mode) == (True, Mode.APPROXIMATE)
    assert "drifted" in why
    assert world.depth(replica) == 0
    while replica.pictures.facts_trust.drifted:
        replica.pictures.facts_trust.observe(1000, 1000, 16)
    world.fleet.judge(replica)
    assert world.verdict() == (True, Mode.PRECISE, "")
    assert world.depth(replica) == 192


def test_another_engine_starts_with_full_trust(world: World) -> None:
    replica = precise(world)
    for _ in range(20):
        replica.pictures.facts_trust.observe(1000, 0, 16)
    replica.status_changed(wire.Status(state=State.READY, epoch=2))
    picture(replica, epoch=2)
    assert world.verdict() == (True, Mode.PRECISE, "")
    assert replica.candidate.trust == 1.0


# -- leaving


def test_queued_frames_of_a_removed_replica_bring_nothing_back(world: World) -> None:
    replica = precise(world)
    world.join("b")
    world.fleet.apply([member.member for name, member in world.fleet.replicas.items() if name != "a"])
    replica.published(Tier.DEVICE, HASHES, DEPTHS)
    replica.snapshot_begins(wire.SnapshotBegin(epoch=2))
    replica.published(Tier.DEVICE, HASHES, DEPTHS)
    replica.snapshot_ended(wire.SnapshotEnd(epoch=2))
    replica.load_reported(wire.Load(inflight=3))
    replica.status_changed(wire.Status(state=State.READY, epoch=2))
    replica.lost("gone")
    while world.knowledge.index.sweep():
        pass
    assert len(world.knowledge.index) == 0
    assert "a" not in world.fleet.replicas
    assert len(world.fleet.candidates) == 0
    with pytest.raises(KeyError):
        world.verdict("a")


def test_a_new_engine_under_an_old_name_is_another_replica(world: World) -> None:
    old = precise(world)
    world.fleet.apply([Member(name="a", engine="http://elsewhere:1", agent="http://a:2")])
    new = world.fleet.replicas["a"]
    assert new is not old
    old.status_changed(wire.Status(state=State.READY, epoch=9))
    assert world.verdict()[0] is False


def test_series_of_a_replica_that_left_are_gone(world: World) -> None:
    precise(world)
    world.fleet.measure()
    assert world.metric("replica_usable", replica="a") == 1
    world.fleet.apply([])
    assert world.metric("replica_usable", replica="a") is None
    assert world.metric("replica_mode_changes_total", replica="a", mode="precise") is None


# -- load and candidates


def test_stale_load_is_not_saturation(world: World) -> None:
    replica = precise(world)
    replica.load_reported(wire.Load(inflight=300, free_blocks=7))
    assert (replica.candidate.inflight, replica.candidate.free_tokens) == (300, 7 * 16)
    world.later(wire.STALE_AFTER_S + 0.1)
    assert replica.candidate.inflight == 0
    assert world.verdict()[0] is True


def test_load_of_a_lost_agent_is_forgotten(world: World) -> None:
    replica = precise(world)
    replica.load_reported(wire.Load(inflight=300))
    replica.lost("reset")
    assert replica.candidate.inflight == 0


def test_costs_reach_the_candidate(world: World) -> None:
    replica = precise(world)
    replica.costs_measured(wire.Costs(prefill_s_per_token=0.5, samples=3))
    assert replica.candidate.rates.p1 == 0.5
    assert replica.candidate.device_tokens == 1000


# -- who may be chosen


def test_nobody_left_is_503_with_retry_after(world: World) -> None:
    precise(world)
    with pytest.raises(RequestError) as caught:
        world.fleet.eligible("", {"a"})
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1)


def test_models_filter_and_unknown_ones_are_404(world: World) -> None:
    for name, models in (("a", ("base",)), ("b", ("base", "adapter"))):
        replica = world.join(name)
        greet(replica, models=models)
    assert {c.name for c in world.fleet.eligible("base", ())} == {"a", "b"}
    assert {c.name for c in world.fleet.eligible("adapter", ())} == {"b"}
    with pytest.raises(RequestError) as unknown:
        world.fleet.eligible("other", ())
    assert (unknown.value.status, unknown.value.code) == (404, "model_not_found")
    with pytest.raises(RequestError) as excluded:
        world.fleet.eligible("adapter", {"b"})
    assert excluded.value.status == 503


def refusal(world: World, model: str) -> tuple[int, int | None]:
    with pytest.raises(RequestError) as caught:
        world.fleet.eligible(model, ())
    return caught.value.status, caught.value.retry_after_s


def test_a_pool_without_replicas_is_503_with_time_to_start_one_not_404() -> None:
    world = World(served_models=("base", "adapter"))
    world.fleet.apply([])
    world.later(5.1)
    assert refusal(world, "base") == (503, 10)
    assert refusal(world, "") == (503, 10)
    assert refusal(world, "other") == (404, None)


def test_without_the_names_of_its_models_an_empty_pool_refuses_none_as_unknown(world: World) -> None:
    world.fleet.apply([])
    world.later(5.1)
    assert refusal(world, "whatever") == (503, 10)


def test_a_model_of_the_pool_that_no_replica_has_loaded_yet_is_503() -> None:
    world = World(served_models=("base", "adapter"))
    greet(world.join("a"), models=("base",))
    assert refusal(world, "adapter") == (503, 1)
    assert refusal(world, "other") == (404, None)


def test_backends_that_do_not_say_their_models_take_any(world: World) -> None:
    replica = world.join("a", agent=False)
    replica.came_up()
    assert len(world.fleet.eligible("whatever", ())) == 1


# -- readiness


def test_readiness_says_what_is_missing(world: World) -> None:
    assert world.fleet.readiness("file: gone") == (False, "members are not known yet: file: gone")
    world.fleet.apply([])
    assert world.fleet.readiness("") == (False, "the pool has no members")
    replica = world.join("a")
    ready, why = world.fleet.readiness("")
    assert not ready
    assert why == "no usable replica: a: not seen answering yet; agent not reached yet"
    greet(replica)
    assert world.fleet.readiness("") == (False, "warming: waiting for the pictures of 1 of 1 replicas")
    picture(replica)
    assert world.fleet.readiness("") == (True, "1 of 1 replicas usable")
    replica.went_down("refused")
    assert world.fleet.readiness("") == (False, "no usable replica: a: down: refused")


def test_readiness_of_a_thousand_replicas_told_a_thousand_reasons(world: World) -> None:
    for number in range(1000):
        world.join(f"r-{number:03}").went_down(f"connection to 10.0.0.{number} refused" if number else "no route")
    _, why = world.fleet.readiness("")
    assert why.startswith("no usable replica: r-000: down: no route; r-001: down: connection to 10.0.0.1 refused; ")
    assert why.endswith(" and 995 more")
    assert len(why) < 500


def test_a_router_apart_from_its_replicas_is_ready_to_say_that_there_are_none() -> None:
    world = World(ready_without_replicas=True)
    assert world.fleet.readiness("") == (False, "members are not known yet")
    world.fleet.apply([])
    assert world.fleet.readiness("") == (True, "the pool has no members")
    replica = world.join("a")
    assert world.fleet.readiness("")[0] is False, "it may know more in a moment"
    world.later(5.1)
    assert world.fleet.readiness("") == (True, "no usable replica: a: not seen answering yet; agent not reached yet")
    greet(replica)
    assert world.fleet.readiness("") == (True, "1 of 1 replicas usable")


def test_a_new_router_does_not_wait_for_ever_for_a_picture(world: World) -> None:
    greet(world.join("a"))
    assert world.fleet.readiness("")[0] is False
    world.later(5.1)
    assert world.fleet.readiness("")[0] is True


def test_the_template_of_most_replicas_seeds_the_chain(world: World) -> None:
    for name, digest in (("a", "x"), ("b", "y"), ("c", "y")):
        replica = world.join(name)
        replica.welcomed(wire.Welcome(replica=name, epoch=1, template=wire.Template(digest=digest)))
        replica.status_changed(wire.Status(state=State.READY, epoch=1))
    assert world.fleet.template.digest == "y"


# -- a disk that several have


def shares(world: World, name: str, store: str, *, told: bool) -> Replica:
    """A replica whose disk is a store; `told`: it says what lies there."""
    replica = world.join(name)
    replica.welcomed(wire.Welcome(replica=name, epoch=1, block_tokens=16, device_tokens=1000))
    replica.status_changed(wire.Status(state=State.READY, epoch=1, store=store))
    replica.snapshot_begins(wire.SnapshotBegin(epoch=1))
    if told:
        replica.published(Tier.DISK, HASHES, DEPTHS)
    replica.snapshot_ended(wire.SnapshotEnd(epoch=1))
    return replica


def test_what_one_says_of_a_shared_disk_all_who_have_it_hold(world: World) -> None:
    one, two, other = (
        shares(world, "a", "s", told=True),
        shares(world, "b", "s", told=False),
        shares(world, "c", "t", told=False),
    )
    assert [world.depth(replica) for replica in (one, two, other)] == [192, 192, 0]
    assert [replica_report(world.fleet, replica).store for replica in (one, two, other)] == ["s", "s", "t"]
    assert two.pictures.facts is not None
    assert two.pictures.facts.depth(HASHES[-1]) == 192, "a fact, with which the engine's word is compared"
    one.retracted(Tier.DISK, HASHES[1:])
    assert [world.depth(replica) for replica in (one, two, other)] == [64, 64, 0]


def test_a_shared_disk_outlives_the_replica_that_wrote_it(world: World) -> None:
    one, two = shares(world, "a", "s", told=True), shares(world, "b", "s", told=True)
    one.went_down("killed")
    one.lost("killed")
    assert world.depth(two) == 192
    world.fleet.apply([two.member])
    assert world.depth(two) == 192
    assert world.depth(shares(world, "d", "s", told=False)) == 192


def test_a_silent_agent_says_nothing_more_of_a_shared_disk(world: World) -> None:
    one, two = shares(world, "a", "s", told=True), shares(world, "b", "s", told=False)
    one.lost("silent")
    assert (world.depth(one), world.depth(two)) == (192, 0), "what it told last goes on as its own history only"


def test_a_restarted_engine_has_its_shared_disk_at_once(world: World) -> None:
    shares(world, "a", "s", told=True)
    two = shares(world, "b", "s", told=True)
    two.status_changed(wire.Status(state=State.STARTING, epoch=2, store="s"))
    two.snapshot_begins(wire.SnapshotBegin(epoch=2))
    two.snapshot_ended(wire.SnapshotEnd(epoch=2))
    two.status_changed(wire.Status(state=State.READY, epoch=2, store="s"))
    assert world.depth(two) == 192


def test_a_replica_that_changes_its_disk_leaves_the_others(world: World) -> None:
    one, two = shares(world, "a", "s", told=True), shares(world, "b", "s", told=False)
    one.status_changed(wire.Status(state=State.READY, epoch=1, store="u"))
    assert (world.depth(one), world.depth(two)) == (192, 0)
