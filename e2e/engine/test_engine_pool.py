"""A whole pool on real vLLM: what must hold there too, not on the sim only (peers.md 3; issue: behaviour that must hold).

Greedy answers of a pool and of one engine are compared by the demo, over its whole workload (prefixpool_cli.demo.greedy).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from prefixpool.policy.base import Reason
from prefixpool_agent.engines.metrics import parse_load
from prefixpool_cli.pool_spec import PoolSpec
from prefixpool_testing.eventually import eventually
from prefixpool_testing.pool_client import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Body, Reply, chat
from prefixpool_testing.sim_pool import SimPool, running, salt_of, text

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

BLOCK = 32
TOLD_S = 2.0  # promised: routers know the new state of an engine by then
RIGHT_AGAIN_S = 10.0  # promised: for the picture of a replica whose agent was killed
ABORTED_S = 5.0  # promised within a second on a machine with nothing else to do
STARTS_S = 600.0  # an engine, on a busy machine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(model: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SimPool]:
    """Two replicas with a core each; the tests use texts of their own."""
    spec = PoolSpec(model=model, replicas=2, block_tokens=BLOCK, device_blocks=321, max_model_len=4096, dev_mode=True)
    async with running(spec, tmp_path_factory.mktemp("pool")) as started:
        yield started


def body_of(path: str, said: str) -> Body:
    """The same greedy request in each API's words."""
    if path == COMPLETIONS:
        return {"prompt": said, "max_tokens": 4, "temperature": 0}
    if path == RESPONSES:
        return {"input": said, "max_output_tokens": 4, "temperature": 0, "store": False}
    return chat(said)


def assert_right(reply: Reply) -> None:
    """The prediction was that of a router that knows."""
    assert abs(reply.predicted - reply.cached) <= BLOCK, (reply.replica, reply.reason, reply.predicted, reply.cached)


async def test_same_chat_twice_is_prefilled_once__peers_20(pool: SimPool) -> None:
    for i in range(4):
        said = text(f"{i} chat twice")
        first = await pool.client.chat(said)
        await pool.settled()
        second = await pool.client.chat(said)
        assert second.replica == first.replica
        assert first.cached <= BLOCK, "at most the template's own first words were known"
        assert second.cached == (second.prompt - 1) // BLOCK * BLOCK
        assert_right(first)
        assert_right(second)


async def test_chat_goes_on_where_its_history_is__peers_20(pool: SimPool) -> None:
    said: list[Any] = [text("opening of a long chat", 100)]
    replica, before, written = "", 0, BLOCK  # the template's own first words may be known
    for turn in range(4):
        reply = await pool.client.chat(*said, max_tokens=40)
        assert replica in ("", reply.replica), "the conversation moved away from its history"
        assert before - BLOCK <= reply.cached <= before + written
        assert_right(reply)
        replica, before, written = reply.replica, reply.prompt, reply.json()["usage"]["completion_tokens"]
        said += [{"role": "assistant", "content": reply.text}, text(f"turn {turn}", 20)]
        await pool.settled()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
async def test_tenants_do_not_find_each_others_prompts__peers_81(pool: SimPool, path: str) -> None:
    body = body_of(path, text(f"{path} of two tenants"))
    first = await pool.client.post(path, body)
    await pool.settled()
    other = await pool.other.post(path, body)
    await pool.settled()
    again = await pool.client.post(path, body)
    assert {reply.status for reply in (first, other, again)} == {200}
    assert other.cached <= BLOCK, "at most the template's own first words, which this tenant has sent before"
    assert other.predicted <= BLOCK
    assert again.cached == (again.prompt - 1) // BLOCK * BLOCK > BLOCK
    assert_right(again)


async def test_salt_of_another_tenant_is_no_way_in__peers_81(pool: SimPool) -> None:
    said = text("with a forged salt")
    await pool.client.chat(said)
    await pool.settled()
    forged = await pool.other.chat(said, cache_salt=salt_of("alpha"))
    assert forged.cached <= BLOCK
    assert forged.predicted <= BLOCK


async def test_reset_cache_is_credited_to_nobody__peers_2(pool: SimPool) -> None:
    said = text("cached and reset", 300)
    first = await pool.client.chat(said)
    await pool.settled()
    assert (await pool.client.chat(said)).predicted > BLOCK
    await pool.settled()
    assert (await pool.engine(first.replica).post("/reset_prefix_cache", b"")).status == 200
    await pool.knows_nothing_of(first.replica)
    third = await pool.client.chat(said)
    assert (await pool.held(third))[first.replica] == 0
    assert third.cached <= BLOCK
    assert_right(third)


@pytest.mark.parametrize("streams", [True, False])
async def test_client_that_leaves_before_the_first_token_frees_the_engine__peers_40(pool: SimPool, *, streams: bool) -> None:
    await pool.settled()
    said = text(f"left during prefill {streams}", 1600)
    asking = asyncio.create_task(pool.client.post(CHAT, chat(said, max_tokens=800, min_tokens=800, stream=streams)))
    await eventually(lambda: inside(pool, 1), what="the request is in an engine")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await eventually(lambda: inside(pool, 0), within_s=ABORTED_S, what="no gate counts it")
    for name in pool.names:  # an engine that computes something tells new figures
        await pool.engine(name).chat("hello", max_tokens=1)
    await eventually(lambda: at_rest(pool), within_s=ABORTED_S, what="no engine works on it")
    await pool.settled()  # nor do agents and routers count it


async def inside(pool: SimPool, requests: int) -> bool:
    """So many are in engines, by their gates."""
    return sum([(await pool.info(name)).inflight for name in pool.names]) == requests


async def at_rest(pool: SimPool) -> bool:
    loads = [parse_load((await pool.engine(name).get("/metrics")).body.decode()) for name in pool.names]
    return not any(load.running or load.waiting for load in loads)


# -- deaths, the longest last


@asynccontextmanager
async def asked_all_the_time(pool: SimPool, said: Sequence[str]) -> AsyncIterator[list[Reply]]:
    """Two clients that ask in turns; all their answers so far."""
    replies: list[Reply] = []
    stopped = asyncio.Event()

    async def ask(first: int) -> None:
        turn = first
        while not stopped.is_set():
            replies.append(await pool.client.post(CHAT, chat(said[turn % len(said)])))
            turn += 1

    async with asyncio.TaskGroup() as group:
        for first in range(2):
            group.create_task(ask(first))
        yield replies
        stopped.set()


async def test_killed_agent_costs_no_request_and_knows_again_within_ten_seconds(pool: SimPool) -> None:
    said = [text(f"{i} known before the agent died") for i in range(6)]
    warm = [await pool.client.chat(one) for one in said]
    await pool.settled()
    name = warm[0].replica
    before = pool.local.replicas[name].supervisor()
    assert before is not None
    long = chat(text("streams while the agent dies", 20), max_tokens=200, min_tokens=200)
    async with asked_all_the_time(pool, said) as replies, pool.client.stream(CHAT, long) as stream:
        await stream.begin()
        pool.local.kill(name, "agent")
        await eventually(lambda: is_back(pool, name, before.agent.pid), within_s=RIGHT_AGAIN_S, what="its picture is whole")
        repeats = [await pool.client.chat(one) for one in said]
        await stream.rest()
    assert (stream.done, stream.errors) == (True, [])
    assert {reply.status for reply in replies} == {200}
    for first, repeat in zip(warm, repeats, strict=True):
        held = (await pool.held(repeat))[first.replica]
        assert abs(held - (repeat.prompt - 1) // BLOCK * BLOCK) <= BLOCK
        assert_right(repeat)
    after = pool.local.replicas[name].supervisor()
    assert after is not None
    assert after.engine == before.engine, "the engine was touched"


async def is_back(pool: SimPool, name: str, old: int | None) -> bool:
    """Another agent runs, and every router has its whole picture."""
    state, views = pool.local.replicas[name].supervisor(), await pool.views(name)
    another = state is not None and state.agent.pid not in (None, old)
    return another and all(view.usable and view.mode == "precise" and view.account == "whole" for view in views)


async def test_restarted_engine_has_forgotten_its_blocks__peers_1(pool: SimPool) -> None:
    said = text("known before the engine died")
    victim = (await pool.client.chat(said)).replica
    await pool.settled()
    assert (await pool.held(await pool.client.chat(said)))[victim] > 0
    old = await pool.info(victim)
    pool.local.kill(victim, "engine")
    await pool.knows_nothing_of(victim, within_s=TOLD_S)
    meanwhile = await pool.client.chat(said)
    assert meanwhile.replica == pool.another(victim)
    await pool.usable(victim, within_s=STARTS_S)
    new = await pool.info(victim)
    assert (new.epoch > old.epoch, new.restarts) == (True, old.restarts + 1)
    reply = await pool.client.chat(said)
    assert (await pool.held(reply))[victim] == 0
    # Cached there meanwhile. An emptied replica gets a share of the hits, so that it is not left empty; the reason says so.
    assert reply.replica == meanwhile.replica or reply.reason == Reason.FRESH
    assert_right(reply)
