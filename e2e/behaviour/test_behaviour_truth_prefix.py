"""What counts as a common prefix, and what follows from one: on a real pool, by what engines report (peers.md 3.A)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from prefixpool_testing.pool_client import COMPLETIONS, system
from prefixpool_testing.sim_pool import ADAPTER, PoolOptions, SimPool, salt_of, text

pytestmark = pytest.mark.asyncio(loop_scope="module")

POOL = PoolOptions(routers=2)  # of which one asks first and the other then: it has only the agents' word
BLOCK = 32


def tool(name: str, about: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"where": {"type": "string", "description": about}}}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


async def test_same_chat_twice_is_prefilled_once__peers_20(pool: SimPool) -> None:
    for i in range(6):
        said = text(f"{i} chat twice")
        first = await pool.elsewhere.chat(said)
        await pool.settled()
        second = await pool.client.chat(said)
        assert (first.cached, first.predicted) == (0, 0)
        assert second.replica == first.replica
        assert second.cached == (second.prompt - 1) // BLOCK * BLOCK
        assert abs(second.predicted - second.cached) <= BLOCK
        assert second.headers["x-prefixpool-cached-tokens"] == str(second.cached)


async def test_chat_goes_on_where_its_history_is__peers_20(pool: SimPool) -> None:
    said = [system(text("instructions of a long chat", 60)), {"role": "user", "content": text("opening", 60)}]
    replica, before = "", 0
    for turn in range(4):
        reply = await (pool.client, pool.elsewhere)[turn % 2].chat(*said, max_tokens=40)
        assert replica in ("", reply.replica), "the conversation moved away from its history"
        assert before - BLOCK <= reply.cached <= before
        assert abs(reply.predicted - reply.cached) <= BLOCK
        replica, before = reply.replica, reply.prompt + 40
        said += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": text(f"turn {turn}", 30)}]
        await pool.settled()


async def test_middle_of_a_prompt_is_no_prefix__peers_18(pool: SimPool) -> None:
    shared = text("A: the shared middle", 200)
    await pool.elsewhere.chat(system(text("X: first head", 80)), shared)
    await pool.elsewhere.post(COMPLETIONS, {"prompt": text("X: first page", 80) + shared, "max_tokens": 1})
    await pool.settled()
    other = await pool.client.chat(system(text("B: second head", 80)), shared)
    page = await pool.client.post(COMPLETIONS, {"prompt": text("B: second page", 80) + shared, "max_tokens": 1})
    for reply in (other, page):
        assert (reply.cached, reply.predicted) == (0, 0)
        assert await pool.held(reply) == dict.fromkeys(pool.names, 0)


async def test_other_tools_are_another_prompt__peers_23(pool: SimPool) -> None:
    said = text("question about tools")
    hammer = [tool("hammer", text("hammer description"))]
    saw = [tool("saw", text("saw description"))]
    await pool.elsewhere.chat(said, tools=hammer)
    await pool.settled()
    other = await pool.client.chat(said, tools=saw)
    assert other.cached <= BLOCK, "only the template's own first words are the same"
    assert other.predicted <= BLOCK
    await pool.settled()
    again = await pool.client.chat(said, tools=hammer)
    assert again.cached == (again.prompt - 1) // BLOCK * BLOCK
    assert abs(again.predicted - again.cached) <= BLOCK


async def test_same_tools_share_a_prefix_whatever_is_asked__peers_23(pool: SimPool) -> None:
    tools = [tool(f"tool{i}", text(f"{i} shared tool", 100)) for i in range(3)]
    first = await pool.elsewhere.chat(text("one question", 20), tools=tools)
    await pool.settled()
    second = await pool.client.chat(text("an other question", 20), tools=tools)
    assert second.replica == first.replica
    assert second.cached >= first.prompt * 3 // 4
    assert abs(second.predicted - second.cached) <= BLOCK


async def test_adapter_hits_its_own_blocks_and_no_others__peers_17(pool: SimPool) -> None:
    said = text("asked of an adapter")
    await pool.elsewhere.chat(said)
    await pool.settled()
    first = await pool.elsewhere.chat(said, model=ADAPTER)
    assert (first.cached, first.predicted) == (0, 0), "the base model's blocks are not the adapter's"
    await pool.settled()
    second = await pool.client.chat(said, model=ADAPTER)
    assert second.replica == first.replica
    assert second.cached == (second.prompt - 1) // BLOCK * BLOCK
    assert abs(second.predicted - second.cached) <= BLOCK


async def test_nothing_cached_anywhere_leaves_the_choice_to_load__peers_16(pool: SimPool) -> None:
    loaded, idle = pool.names
    placed = [(await pool.client.chat(text(f"{i} idle pool", 20))).replica for i in range(16)]
    assert set(placed) == {loaded, idle}, "without load both get new texts"
    engine = pool.engine(loaded)
    long = [
        asyncio.create_task(engine.chat(text(f"{i} busy", 20), max_tokens=600, min_tokens=600, cache_salt=salt_of("alpha")))
        for i in range(24)
    ]
    try:
        await pool.in_flight(loaded, 24)
        replies = [await pool.client.chat(text(f"{i} loaded pool", 20), max_tokens=1) for i in range(8)]
        assert (await pool.info(loaded)).inflight == 24, "the load ended too early to show anything"
    finally:
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)
    assert {reply.replica for reply in replies} == {idle}
    assert {reply.reason for reply in replies} <= {"cold", "cold_moved"}
    for reply in replies:
        assert await pool.held(reply) == {loaded: 0, idle: 0}


async def test_reset_cache_is_credited_to_nobody__peers_2(pool: SimPool) -> None:
    said = text("cached and reset", 300)
    first = await pool.client.chat(said)
    await pool.settled()
    second = await pool.client.chat(said)
    assert second.replica == first.replica
    assert second.predicted > 0
    holder = pool.engine(first.replica)
    assert (await holder.post("/reset_prefix_cache", b"")).status == 200
    await pool.knows_nothing_of(first.replica)
    third = await pool.client.chat(said)
    assert await pool.held(third) == dict.fromkeys(pool.names, 0)
    assert (third.predicted, third.cached) == (0, 0)
