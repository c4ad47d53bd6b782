"""All at once and in any order: members come and go, agents tell, requests run and end, the index is swept (peers.md 51)."""

from __future__ import annotations

from array import array
from random import Random

import pytest
from prometheus_client import CollectorRegistry

from prefixpool import wire
from prefixpool.chain import canonical, prefix_chain
from prefixpool.errors import RequestError
from prefixpool.wire import State, Tier
from prefixpool_router.attempt import FleetDispatch
from prefixpool_router.dispatch import FleetDispatcher
from prefixpool_router.dispatch_types import Outcome, RoutedRequest
from prefixpool_router.explain import DecisionRing
from prefixpool_router.fleet import Fleet, FleetSettings
from prefixpool_router.knowledge import Knowledge
from prefixpool_router.membership import Member, MemberState
from prefixpool_router.metrics import RoutingMetrics
from prefixpool_router.replica import Replica

NAMES = [f"p-{i}" for i in range(5)]
PATH = "/v1/chat/completions"
TEXTS = [f"{i} " + "shared words " * 40 for i in range(4)]
PROMPT_TOKENS = 400
STEPS = 400


class Storm:
    """One fleet, and what happens to it; every step leaves it sound."""

    def __init__(self, seed: int) -> None:
        self.draw = Random(seed)
        self.now = 100.0
        self.registry = CollectorRegistry()
        metrics = RoutingMetrics(self.registry)
        self.fleet = Fleet(Knowledge(1 << 20), metrics, FleetSettings(history_ttl_s=20.0), lambda: self.now)
        self.dispatcher = FleetDispatcher(self.fleet, metrics, DecisionRing(16), policy="prefix", draw=self.draw.random)
        self.running: list[FleetDispatch] = []
        self.gone: list[Replica] = []  # whose late frames still arrive
        self.epoch = 1
        self.steps = [
            *(self.members_change, self.agent_greets, self.snapshot, self.publish, self.retract, self.load, self.status),
            *(self.agent_lost, self.connection_lost, self.probe_answered, self.fence, self.time_passes, self.sweep),
            *[self.request] * 8,
            *[self.request_ends] * 8,
        ]

    def step(self) -> None:
        self.draw.choice(self.steps)()

    def replica(self) -> Replica | None:
        """Mostly a member, sometimes one that has left."""
        known = list(self.fleet.replicas.values()) + (self.gone if self.draw.random() < 0.2 else [])
        return self.draw.choice(known) if known else None

    def members_change(self) -> None:
        before = dict(self.fleet.replicas)
        rows = []
        for name in self.draw.sample(NAMES, self.draw.randrange(len(NAMES) + 1)):
            agent = f"http://{name}:2" if self.draw.random() < 0.8 else None
            state = self.draw.choice([*[MemberState.READY] * 4, MemberState.TERMINATING, MemberState.NOT_READY])
            rows.append(Member(name=name, engine=f"http://{name}:{self.draw.randrange(1, 3)}", agent=agent, state=state))
        self.fleet.apply(rows)
        left = [replica for name, replica in before.items() if self.fleet.replicas.get(name) is not replica]
        self.gone = (self.gone + left)[-3:]

    def agent_greets(self) -> None:
        if replica := self.replica():
            self.epoch += self.draw.random() < 0.3
            welcome = wire.Welcome(
                replica=replica.name,
                epoch=self.epoch,
                block_tokens=16,
                device_tokens=10_000,
                max_inflight=self.draw.choice([0, 2]),
            )
            replica.welcomed(welcome)
            replica.status_changed(wire.Status(state=State.READY, epoch=self.epoch))

    def snapshot(self) -> None:
        if replica := self.replica():
            replica.snapshot_begins(wire.SnapshotBegin(epoch=self.epoch))
            if self.draw.random() < 0.8:
                self.publish()
                replica.snapshot_ended(wire.SnapshotEnd(epoch=self.epoch))

    def publish(self) -> None:
        if replica := self.replica():
            chain = prefix_chain(canonical(PATH, self.body()) or pytest.fail("no chain"))
            upto = self.draw.randrange(len(chain.hashes) + 1)
            depths = array("I", [offset // 4 for offset in chain.offsets[:upto]])
            replica.published(self.draw.choice([Tier.DEVICE, Tier.HOST, Tier.DISK]), chain.hashes[:upto], depths)

    def retract(self) -> None:
        if replica := self.replica():
            chain = prefix_chain(canonical(PATH, self.body()) or pytest.fail("no chain"))
            since = self.draw.randrange(len(chain.hashes) + 1)
            replica.retracted(self.draw.choice([Tier.DEVICE, Tier.HOST, Tier.DISK]), chain.hashes[since:])

    def load(self) -> None:
        if replica := self.replica():
            replica.load_reported(
                wire.Load(inflight=self.draw.randrange(5), prefill_backlog_tokens=self.draw.randrange(5000))
            )

    def status(self) -> None:
        if replica := self.replica():
            store = self.draw.choice(["", "red", "blue"])
            replica.status_changed(wire.Status(state=self.draw.choice(list(State)), epoch=self.epoch, store=store))

    def agent_lost(self) -> None:
        if replica := self.replica():
            replica.lost("storm")

    def connection_lost(self) -> None:
        if replica := self.replica():
            replica.went_down("storm")

    def probe_answered(self) -> None:
        if replica := self.replica():
            replica.came_up()

    def fence(self) -> None:
        if replica := self.replica():
            replica.was_fenced()

    def time_passes(self) -> None:
        self.now += self.draw.random() * 3
        self.fleet.tick(0.0)

    def sweep(self) -> None:
        self.fleet.knowledge.index.sweep()

    def body(self) -> dict[str, object]:
        texts = [self.draw.choice(TEXTS) for _ in range(self.draw.randrange(1, 3))]
        return {"model": "m", "messages": [{"role": "user", "content": text} for text in texts]}

    def request(self) -> None:
        try:
            self.running.append(self.dispatcher.dispatch(RoutedRequest(path=PATH, body=self.body())))
        except RequestError as error:
            if error.status != 503:
                raise
            return
        sent = self.running[-1]
        assert self.fleet.verdict(sent.replica).usable
        assert 0 <= sent.predicted_tokens < 10_000

    def request_ends(self) -> None:
        if not self.running:
            return
        dispatch = self.running.pop(self.draw.randrange(len(self.running)))
        if self.draw.random() < 0.5:
            dispatch.first_byte()
        how = self.draw.random()
        if how < 0.6:
            cached = self.draw.choice([0, dispatch.predicted_tokens])
            dispatch.finish(Outcome(status=200, prompt_tokens=PROMPT_TOKENS, cached_tokens=cached, output_tokens=3))
        elif how < 0.8:
            dispatch.finish(Outcome(status=499, aborted=True))
        else:
            why = self.draw.choice(["refused", "busy", "fenced"])
            dispatch.abandon(why, replica_down=why == "refused")

    def check(self) -> None:
        """What must be true after any step."""
        candidates, index = self.fleet.candidates, self.fleet.knowledge.index
        bits = [candidate.bit for candidate in candidates if candidate.bit]
        assert len(bits) == len(set(bits)), "two replicas share a column"
        assert candidates.total_inflight == sum(candidate.inflight for candidate in candidates)
        for candidate in candidates:
            assert self.fleet.verdict(candidate.name).usable
            assert candidate.inflight >= 0
            assert candidate.pending_tokens >= 0
        open_bits = 0
        for replica in self.fleet.replicas.values():
            for picture in (replica.pictures.facts, replica.pictures.history):
                open_bits |= picture.bit * 0b111 if picture is not None else 0
        chain = prefix_chain(canonical(PATH, self.body()) or pytest.fail("no chain"))
        for level in index.walk(chain.hashes, 16, self.fleet.knowledge.predicted.marks).levels:
            assert not level.held & ~open_bits, "somebody who left, or forgot, is said to hold something"

    def check_series(self) -> None:
        """As somebody reads them."""
        self.fleet.measure()
        told = {sample.labels.get("replica") for family in self.registry.collect() for sample in family.samples}
        assert told - {None} <= self.fleet.replicas.keys(), "somebody who left has series"

    def calm(self) -> None:
        """End everything."""
        while self.running:
            self.request_ends()
        for _ in range(60):
            self.now += 1.0
            self.fleet.tick(0.0)
        for replica in self.fleet.replicas.values():
            assert (replica.load.own, replica.load.own_tokens) == (0, 0)
        self.fleet.apply([])
        while self.fleet.knowledge.index.sweep():
            pass
        assert len(self.fleet.knowledge.index) == 0
        assert len(self.fleet.knowledge.predicted) == 0
        assert len(self.fleet.candidates) == 0
        assert self.fleet.candidates.total_inflight == 0


@pytest.mark.parametrize("seed", range(20))
def test_a_storm_leaves_the_fleet_sound_and_in_the_end_empty(seed: int) -> None:
    storm = Storm(seed)
    for step in range(STEPS):
        storm.step()
        storm.check()
        if step % 20 == 0:
            storm.check_series()
    storm.calm()
    storm.check_series()
