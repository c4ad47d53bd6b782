"""What routers get: a whole picture first, then changes in order; a slow one gets a new picture, never a hole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from prefixpool import wire
from prefixpool.wire import Tier
from prefixpool_agent import publisher as module
from prefixpool_agent.publisher import Publisher, RouterLink

READY = wire.Status(state=wire.State.READY, epoch=1)


class Counts:
    def __init__(self) -> None:
        self.overflows = 0
        self.snapshots: list[str] = []
        self.now = 0

    def routers(self, connected: int) -> None:
        self.now = connected

    def overflowed(self) -> None:
        self.overflows += 1

    def snapshot_taken(self, reason: str) -> None:
        self.snapshots.append(reason)

    def stream_broken(self) -> None:
        pass


class Cache:
    """The truth that snapshots are made of."""

    def __init__(self) -> None:
        self.device: dict[int, int] = {}
        self.asked = 0

    def snapshot(self) -> Iterator[tuple[Tier, list[int], list[int]]]:
        self.asked += 1
        yield Tier.DEVICE, list(self.device), list(self.device.values())


class Router:
    """Applies frames as a router must: forget at `SnapshotBegin`, trust from `SnapshotEnd` on."""

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self.link: RouterLink = publisher.join("r")
        self.held: dict[int, int] = {}
        self.whole = False
        self.kinds: list[str] = []
        self.announced = -1

    def read(self, frames: int = 1_000_000) -> Router:
        for _ in range(frames):
            frame = self.publisher.next_frame(self.link)
            if frame is None:
                break
            self._apply(wire.decode_from_agent(frame))
        return self

    def _apply(self, message: wire.FromAgent) -> None:
        self.kinds.append(type(message).__name__)
        match message:
            case wire.SnapshotBegin():
                self.held, self.whole, self.announced = {}, False, message.boundaries
            case wire.SnapshotEnd():
                self.whole = True
            case wire.Publish():
                self.held |= zip(wire.unpack_hashes(message.hashes), wire.unpack_depths(message.depths), strict=True)
            case wire.Retract():
                for gone in wire.unpack_hashes(message.hashes):
                    self.held.pop(gone, None)
            case _:
                pass


@pytest.fixture
def counts() -> Counts:
    return Counts()


@pytest.fixture
def cache() -> Cache:
    return Cache()


@pytest.fixture
def publisher(cache: Cache, counts: Counts) -> Publisher:
    return Publisher(wire.Welcome(replica="p-0", epoch=1), cache.snapshot, counts)


def change(publisher: Publisher, cache: Cache, add: dict[int, int], gone: tuple[int, ...] = ()) -> None:
    cache.device |= add
    for key in gone:
        del cache.device[key]
    publisher.publish({Tier.DEVICE: list(add.items())} if add else {}, {Tier.DEVICE: list(gone)} if gone else {})


def test_welcome_then_state_then_a_whole_picture(publisher: Publisher, cache: Cache) -> None:
    cache.device = {i: i * 32 for i in range(10_000)}
    publisher.tell(READY)
    router = Router(publisher).read()
    assert router.kinds == ["Welcome", "Status", "SnapshotBegin", "Publish", "Publish", "Publish", "SnapshotEnd"]
    assert (router.held, router.announced, router.whole) == (cache.device, 10_000, True)
    assert publisher.synchronised()


def test_picture_with_holes_is_not_sent_until_it_is_whole(publisher: Publisher, cache: Cache) -> None:
    publisher.hold()
    publisher.tell(READY)
    router = Router(publisher).read()
    change(publisher, cache, {1: 32})
    publisher.restart("events lost")
    assert router.read().kinds == ["Welcome", "Status"]
    assert not publisher.synchronised()
    change(publisher, cache, {2: 64})
    publisher.release()
    assert router.read().kinds[2:] == ["SnapshotBegin", "Publish", "SnapshotEnd"]
    assert router.held == {1: 32, 2: 64}


def test_changes_after_the_picture(publisher: Publisher, cache: Cache) -> None:
    router = Router(publisher).read()
    change(publisher, cache, {1: 32, 2: 64})
    change(publisher, cache, {3: 96}, gone=(1,))
    assert router.read().held == {2: 64, 3: 96}


def test_changes_during_the_picture_are_not_lost(publisher: Publisher, cache: Cache) -> None:
    cache.device = {i: i for i in range(20_000)}
    router = Router(publisher).read(4)  # in the middle of it
    assert not router.whole
    change(publisher, cache, {99_999: 5}, gone=(0, 19_999))
    assert router.read().held == cache.device


def test_router_that_reads_too_slowly_gets_a_new_picture_not_a_hole(
    publisher: Publisher, cache: Cache, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUEUE_BYTES", 4096)
    slow, quick = Router(publisher).read(), Router(publisher).read()
    for i in range(2000):
        change(publisher, cache, {i: i * 32}, gone=(i - 100,) if i >= 100 else ())
        quick.read()
    assert slow.link._changes_bytes <= 4096
    assert counts.overflows > 0
    assert slow.read().held == quick.held == cache.device
    assert slow.kinds.count("SnapshotBegin") == 2  # one for all overflows together
    assert counts.snapshots[-1] == "router too slow"


def test_one_picture_is_made_for_many_routers(publisher: Publisher, cache: Cache) -> None:
    cache.device = {i: i for i in range(5000)}
    routers = [Router(publisher) for _ in range(64)]
    assert all(router.read().held == cache.device for router in routers)
    assert cache.asked == 1


def test_only_the_newest_load_waits_for_a_slow_router(publisher: Publisher) -> None:
    router = Router(publisher).read()
    for inflight in range(100):
        publisher.tell(wire.Load(inflight=inflight))
    router.kinds.clear()
    frame = publisher.next_frame(router.link)
    assert frame is not None
    assert wire.decode_from_agent(frame) == wire.Load(inflight=99)
    assert publisher.next_frame(router.link) is None


def test_restart_voids_what_is_queued(publisher: Publisher, cache: Cache) -> None:
    router = Router(publisher).read()
    change(publisher, cache, {1: 32})
    cache.device.clear()
    publisher.restart("engine ended")
    assert router.read().held == {}
    assert router.whole


def test_another_epoch_is_a_new_picture_on_the_same_connection(publisher: Publisher) -> None:
    router = Router(publisher).read()
    publisher.welcome(wire.Welcome(replica="p-0", epoch=2), "engine restarted")
    assert not router.link.closing
    assert router.read().kinds[-2:] == ["SnapshotBegin", "SnapshotEnd"]


def test_other_facts_need_a_new_connection(publisher: Publisher) -> None:
    router = Router(publisher).read()
    publisher.welcome(wire.Welcome(replica="p-0", epoch=2, device_tokens=64), "engine restarted")
    assert router.link.closing


def test_boundary_that_moves_between_tiers_is_never_nowhere(publisher: Publisher) -> None:
    router = Router(publisher).read()
    router.kinds.clear()
    publisher.publish({Tier.HOST: [(1, 32)]}, {Tier.DEVICE: [1]})
    assert router.read().kinds == ["Publish", "Retract"]


def test_fence_waits_for_every_connected_router(publisher: Publisher) -> None:
    one, two = Router(publisher), Router(publisher)
    publisher.refence()
    assert publisher.unacknowledged() == 2
    one.link.acknowledged_epoch = 1
    assert publisher.unacknowledged() == 1
    publisher.leave(two.link)  # a router that is gone sends nothing
    assert publisher.unacknowledged() == 0
    publisher.welcome(wire.Welcome(replica="p-0", epoch=2), "engine restarted")
    assert publisher.unacknowledged() == 1


def test_router_that_joins_later_hears_of_state_and_costs(publisher: Publisher) -> None:
    publisher.tell(READY)
    publisher.tell(wire.Costs(prefill_s_per_token=0.5))
    assert {"Status", "Costs"} <= set(Router(publisher).read().kinds)
