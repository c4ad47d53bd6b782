"""A disk that several replicas have, against a model that keeps what each of them said in plain sets."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefixpool.index import PrefixIndex
from prefixpool.levels import Level
from prefixpool.wire import Tier

BLOCK = 16
KEYS = [0x9E3779B97F4A7C15 * (i + 1) % 2**64 for i in range(60)]
DEPTHS = range(BLOCK, BLOCK * (len(KEYS) + 1), BLOCK)
LENGTHS = st.integers(0, len(KEYS))
STORES = st.sampled_from(["", "red", "blue"])


def depth(levels: Sequence[Level], column: int, tier: int) -> int:
    return max((level.tokens for level in levels if level[tier] >> 3 * column & 1), default=0)


def tell(index: PrefixIndex, column: int, *, upto: int, tier: Tier) -> None:
    index.add(column, KEYS[:upto], DEPTHS[:upto], tier)
    index.remove(column, KEYS[upto:], tier)


class Replica:
    """What one replica said: how far its own tiers reach, and how much of the text the disk has, which it calls `store`."""

    def __init__(self, store: str) -> None:
        self.store = store
        self.device = self.host = self.disk = 0


class Pool(RuleBasedStateMachine):
    """Replicas come, tell, change their disks and die in any order."""

    @initialize()
    def start(self) -> None:
        self.index = PrefixIndex(100_000)
        self.replicas: dict[int, Replica] = {}

    @precondition(lambda self: len(self.replicas) < 6)
    @rule(store=STORES)
    def join(self, store: str) -> None:
        column = self.index.open_column()
        self.index.mount(column, store)
        self.replicas[column] = Replica(store)

    @precondition(lambda self: self.replicas)
    @rule(data=st.data(), device=LENGTHS, host=LENGTHS, disk=LENGTHS)
    def told(self, data: st.DataObject, device: int, host: int, disk: int) -> None:
        column = data.draw(st.sampled_from(sorted(self.replicas)))
        replica = self.replicas[column]
        replica.device, replica.host, replica.disk = device, host, disk
        for upto, tier in ((device, Tier.DEVICE), (host, Tier.HOST), (disk, Tier.DISK)):
            tell(self.index, column, upto=upto, tier=tier)

    @precondition(lambda self: self.replicas)
    @rule(data=st.data(), store=STORES)
    def has_another_disk(self, data: st.DataObject, store: str) -> None:
        column = data.draw(st.sampled_from(sorted(self.replicas)))
        self.index.mount(column, store)
        self.replicas[column].store = store

    @precondition(lambda self: self.replicas)
    @rule(data=st.data(), clean=st.booleans())
    def dies(self, data: st.DataObject, clean: bool) -> None:
        column = data.draw(st.sampled_from(sorted(self.replicas)))
        del self.replicas[column]
        self.index.drop_column(column)
        while clean and self.index.sweep():
            pass

    def disk(self, column: int) -> int:
        """As far as anybody who is there says of the same disk."""
        own = self.replicas[column]
        if not own.store:
            return own.disk
        return max(each.disk for each in self.replicas.values() if each.store == own.store)

    @invariant()
    def every_replica_has_its_own_tiers_and_what_is_on_its_disk(self) -> None:
        if not hasattr(self, "index"):
            return
        levels = self.index.walk(KEYS, BLOCK).levels
        for column, replica in self.replicas.items():
            near = max(replica.device, replica.host)
            expected = (replica.device, near, max(near, self.disk(column)))
            assert tuple(depth(levels, column, tier) // BLOCK for tier in (1, 2, 3)) == expected
            for key, tokens in ((KEYS[0], DEPTHS[0]), (KEYS[-1], DEPTHS[-1])):
                held = expected[2] * BLOCK >= tokens
                assert self.index.depth(key, 1 << 3 * column) == (tokens if held else 0)
        assert [self.index.count(column) for column in self.replicas] == [
            max(replica.device, replica.host, replica.disk) for replica in self.replicas.values()
        ]


TestPool = Pool.TestCase
TestPool.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_the_death_of_the_one_who_wrote_it_leaves_a_shared_disk_as_it_is() -> None:
    index = PrefixIndex(1000)
    writer, other, stranger = (index.open_column() for _ in range(3))
    for column in (writer, other):
        index.mount(column, "red")
    tell(index, writer, upto=40, tier=Tier.DISK)
    tell(index, other, upto=40, tier=Tier.DISK)
    index.drop_column(writer)
    newcomer = index.open_column()
    index.mount(newcomer, "red")
    levels = index.walk(KEYS, BLOCK).levels
    assert [depth(levels, column, 3) for column in (other, newcomer, stranger)] == [640, 640, 0]


def test_a_prefix_goes_on_on_the_shared_disk_where_the_own_device_ends() -> None:
    index = PrefixIndex(1000)
    writer, other = index.open_column(), index.open_column()
    for column in (writer, other):
        index.mount(column, "red")
    tell(index, writer, upto=60, tier=Tier.DISK)
    tell(index, other, upto=25, tier=Tier.DEVICE)
    levels = index.walk(KEYS, BLOCK).levels
    assert [depth(levels, other, tier) // BLOCK for tier in (1, 2, 3)] == [25, 25, 60]
    index.remove(writer, KEYS[30:], Tier.DISK)
    assert depth(index.walk(KEYS, BLOCK).levels, other, 3) == 30 * BLOCK
