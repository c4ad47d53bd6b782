"""Counts of what is under way: right while it is, zero when it is over, however it ended (peers.md 3.B and 3.C)."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

import aiohttp
import pytest

from prefixpool_testing.eventually import PATIENCE_S, eventually
from prefixpool_testing.pool_client import CHAT, COMPLETIONS, Body, chat
from prefixpool_testing.sim_pool import PoolOptions, SimPool, text
from prefixpool_testing.traffic import clients_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

POOL = PoolOptions(
    replicas=2,
    routers=2,
    device_blocks=3000,
    time_scale=0.05,
    engine_args="--prefill-s-per-token2 1.4e-5 --max-num-batched-tokens 256",  # long prompts take long, short ones do not
)
FREED_S = 10.0


async def counts(pool: SimPool) -> Counter[str]:
    """Everything that counts requests under way, in engines, gates, agents and routers, by what it is called."""
    found: Counter[str] = Counter()
    for name in pool.names:
        info = await pool.info(name)
        found += Counter({"gate": info.inflight, "running": info.running, "waiting": info.waiting})
        for view in await pool.views(name):
            found += Counter({"seen": view.inflight, "own": view.own_inflight, "pending": view.pending_tokens})
            found += Counter({"promised": view.promised_boundaries})
    for metric in ("open_requests", "waiting_requests"):
        found += Counter({metric: int(await pool.metric(f"prefixpool_router_{metric}"))})
    return +found


async def none_left(pool: SimPool, within_s: float = PATIENCE_S) -> None:
    async def check() -> bool:
        return not await counts(pool)

    try:
        await eventually(check, within_s=within_s, what="nothing under way")
    except AssertionError:
        raise AssertionError(f"still counted: {await counts(pool)}") from None


async def test_a_thousand_random_aborts_leave_no_count__peers_30_34(pool: SimPool) -> None:
    draw = Random(30)
    ended: Counter[str] = Counter()

    async def ask(number: int) -> None:
        body = chat(text(f"aborted {number % 40}", 60), max_tokens=30, min_tokens=30, stream=number % 2 == 0)
        client = clients_of(pool)[number % 2]
        try:
            async with asyncio.timeout(draw.choice((0.002, 0.02, 0.1, 0.3)) * draw.random()):
                await client.post(CHAT, body)
                ended["answered"] += 1
        except TimeoutError:
            ended["aborted"] += 1

    for first in range(0, 1000, 50):
        await asyncio.gather(*(ask(number) for number in range(first, first + 50)))
    assert ended.total() == 1000
    assert ended["aborted"] > 300
    await none_left(pool)
    replies = await asyncio.gather(*(client.chat(text("after the aborts")) for client in clients_of(pool)))
    assert {reply.status for reply in replies} == {200}


async def test_a_prompt_waited_for_as_long_as_its_whole_answer_was_decoded(pool: SimPool) -> None:
    async def waits() -> int:
        """As the router tells that sent it; 0 also if nothing was sent."""
        views = [view for name in pool.names for view in await pool.views(name)]
        return sum(view.pending_tokens for view in views if view.own_inflight)

    async def is_decoded() -> bool:
        return not await waits()

    body = chat(text("long and whole", 900), max_tokens=6000, min_tokens=6000)
    asking = asyncio.create_task(pool.client.post(CHAT, body))
    try:
        await eventually(waits, what="its prompt waits")
        await eventually(is_decoded, what="its prompt waits no more")
        assert not asking.done()
        assert (await counts(pool))["own"] == 1
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await none_left(pool)


async def test_count_stays_one_for_as_long_as_a_stream_runs__peers_30_34(pool: SimPool) -> None:
    seen: set[tuple[int, ...]] = set()
    body = chat(text("counted while it streams"), max_tokens=400, min_tokens=400)
    async with pool.client.stream(CHAT, body) as stream:
        await stream.begin()
        await pool.in_flight(stream.replica, 1)
        reading = asyncio.create_task(stream.rest())
        while not reading.done():
            views = await pool.views(stream.replica)
            if not reading.done():
                seen.add(tuple(view.inflight for view in views))
    assert stream.done
    assert seen <= {(1, 1), (1, 0), (0, 1), (0, 0)}
    assert (1, 1) in seen
    await none_left(pool)


@pytest.mark.parametrize("streaming", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_client_that_leaves_before_the_first_token_frees_the_engine__peers_40(
    pool: SimPool, path: str, streaming: bool
) -> None:
    said = text(f"left during prefill {path} {streaming}", 3000)  # its prefill takes much longer than `FREED_S`
    body: Body = {"messages": [{"role": "user", "content": said}]} if path == CHAT else {"prompt": said}
    asking = asyncio.create_task(pool.client.post(path, {**body, "max_tokens": 1000, "stream": streaming}))

    async def under_way() -> bool:
        return (await counts(pool))["gate"] == 1

    await eventually(under_way, what="the request is in the engine")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await none_left(pool, FREED_S)


async def test_a_thousand_clients_at_once_each_get_their_own_answer(pool: SimPool) -> None:
    asked = [text(f"one of a thousand {number}", 3) for number in range(20)]
    expected = {said: (await pool.client.chat(said, max_tokens=2)).text for said in asked}
    clients = clients_of(pool)

    async def ask(number: int) -> bool:
        said = asked[number % len(asked)]
        return (await clients[number % 2].chat(said, max_tokens=2)).text == expected[said]

    answers = await asyncio.gather(*(ask(number) for number in range(1000)))
    assert answers == [True] * 1000
    await none_left(pool)


async def test_hundreds_of_streams_at_once_are_each_whole_and_health_answers__peers_48(pool: SimPool) -> None:
    said = text("what every stream says", 3)
    expected = (await pool.client.chat(said, max_tokens=12, min_tokens=12)).text
    healthy: list[int] = []

    async def watch() -> None:
        while True:
            for router in pool.local.routers:
                async with pool.http.get(router.admin_url + "/healthz", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                    healthy.append(answer.status)
            await asyncio.sleep(0.05)

    async def one(number: int) -> tuple[bool, str]:
        client = clients_of(pool)[number % 2]
        async with client.stream(CHAT, chat(said, max_tokens=12, min_tokens=12)) as stream:
            await stream.rest()
        return stream.done, stream.text

    watching = asyncio.create_task(watch())
    try:
        streamed = await asyncio.gather(*(one(number) for number in range(300)))
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    assert set(streamed) == {(True, expected)}
    assert set(healthy) == {200}
    await none_left(pool)
