"""Hot prefixes, herds and newcomers behind eight router processes that share a port (peers.md 3.B; issue: 25 to 28)."""

from __future__ import annotations

import asyncio
from collections import Counter
from math import sqrt

import pytest
import pytest_asyncio

from prefixpool_testing.eventually import eventually
from prefixpool_testing.sim_pool import PoolOptions, SimPool, text
from prefixpool_testing.traffic import streams, traffic

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUTERS = 8
# Decoding slows down with each request, so that many at a time stay under way and few do not take long.
POOL = PoolOptions(
    replicas=3,
    router_workers=ROUTERS,
    device_blocks=3000,
    time_scale=0.1,
    engine_args="--decode-step-s-per-sequence 0.05",
)
ENDLESS = 4000  # tokens: longer than any test, ended by going away
AT_ONCE = 8  # decided by as many routers at the same time, each before it can know of the others


@pytest_asyncio.fixture(autouse=True, scope="module", loop_scope="module")
async def all_routers(pool: SimPool) -> None:
    async def check() -> bool:
        return len(await pool.routers()) == ROUTERS

    await eventually(check, what=f"{ROUTERS} router processes")
    await pool.usable()


async def loads(pool: SimPool) -> dict[str, int]:
    """Requests in each replica, by its gate's own count."""
    return {name: (await pool.info(name)).inflight for name in pool.names}


@pytest.mark.parametrize("known", [False, True], ids=["cold", "warm"])
async def test_a_hundred_identical_requests_at_once_do_not_land_on_one__peers_27(pool: SimPool, known: bool) -> None:
    said = text(f"asked by a hundred, {known}", 200)
    if known:
        await pool.client.chat(said)
        await pool.settled()
    async with streams([pool.client], [said] * 100, tokens=ENDLESS, at_once=100) as running:
        shares = Counter(stream.replica for stream in running)
        assert sum((await loads(pool)).values()) == 100, "all of them were under way at the same time"
    await pool.settled()
    assert len(shares) == 3
    assert max(shares.values()) <= 85


async def test_no_replica_is_far_above_the_mean_while_another_is_below__peers_25(pool: SimPool) -> None:
    hot, mean = text("held by many", 200), 30
    said = [hot if i % 10 else text(f"{i} beside the hot one", 40) for i in range(3 * mean)]
    async with streams([pool.client], said, tokens=ENDLESS, at_once=AT_ONCE) as running:
        held = await loads(pool)
        assert Counter(stream.replica for stream in running) == held
    await pool.settled()
    assert max(held.values()) <= 1.25 * mean + max(4, 2 * sqrt(mean)) + AT_ONCE - 1, held


async def test_a_hot_prefix_at_ten_times_the_rate_is_served_by_several__peers_26(pool: SimPool) -> None:
    hot = text("the hot prefix", 200)
    places: Counter[str] = Counter()

    async def ask_hot(number: int) -> None:
        for turn in range(4):
            reply = await pool.client.chat(hot + text(f"{number} {turn}", 10))
            places[reply.replica] += 1

    async with traffic([pool.client], lanes=3, name="background") as background:
        await asyncio.gather(*(ask_hot(number) for number in range(30)))
    assert not background.failures
    assert sum(places.values()) == 120
    assert places.most_common()[1][1] > 0.2 * 120, places


async def test_a_new_replica_gets_half_its_fair_share_of_the_traffic__peers_29(pool: SimPool) -> None:
    async with traffic([pool.client], name="a pool that grows", max_tokens=1) as seen:
        await seen.more(40)
    name = await pool.local.add()
    await pool.usable(name)
    async with traffic([pool.client], name="a pool that grows", max_tokens=1) as seen:
        await seen.more(250)
    assert not seen.failures
    assert seen.served[name] >= seen.served.total() / 4 / 2, seen.served


async def test_nothing_is_left_of_it_all(pool: SimPool) -> None:
    await pool.settled()
    for name in pool.names:
        assert {(view.inflight, view.pending_tokens) for view in await pool.views(name)} == {(0, 0)}
