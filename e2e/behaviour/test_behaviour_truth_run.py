"""One run of a pool in which an engine, an agent and a router die or are replaced: what is known stays true through it all,
and no prompt is in any log or on any socket but the proxied ones (peers.md 3.A; issue: behaviour that must hold).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
import pytest
import zmq
import zmq.asyncio

from prefixpool import names, wire
from prefixpool_testing.eventually import eventually
from prefixpool_testing.leaks import Traces, descendants, listening_ports
from prefixpool_testing.pool_client import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Body, Reply, chat, system
from prefixpool_testing.sim_pool import KEYS, MARKER, PoolOptions, SimPool, salt_of, text
from prefixpool_testing.traffic import clients_of, traffic

pytestmark = pytest.mark.asyncio(loop_scope="module")

POOL = PoolOptions(
    routers=2,
    device_blocks=1000,
    time_scale=0.05,
    router_args=("--log-level=debug", "--access-log=true"),
    worker_args=("--log-level=debug",),
)
BLOCK = 32
TOLD_S = 2.0  # promised: routers know the new state of an engine by then
RIGHT_AGAIN_S = 10.0  # promised: for the picture of a replica whose agent was killed


async def warm(pool: SimPool, name: str, said: Sequence[str]) -> None:
    """Put prompts of scope alpha into one engine, wherever routers would have sent them."""
    for one in said:
        await pool.engine(name).chat(one, cache_salt=salt_of("alpha"))
    await pool.settled()


async def ask_all(pool: SimPool, said: Sequence[str]) -> list[Reply]:
    return [await pool.client_of("alpha", i % len(pool.local.routers)).chat(one) for i, one in enumerate(said)]


def assert_right(replies: Sequence[Reply]) -> None:
    """Predictions were those of a router that knows."""
    wrong = [reply for reply in replies if abs(reply.predicted - reply.cached) > BLOCK]
    assert [(reply.replica, reply.reason, reply.predicted, reply.cached, reply.request_id) for reply in wrong] == []


def hit_rate(replies: Sequence[Reply]) -> float:
    return sum(reply.cached for reply in replies) / sum(reply.prompt for reply in replies)


# -- deaths


async def test_killed_agent_costs_no_request_and_knows_again_within_ten_seconds(pool: SimPool) -> None:
    said = [text(f"{i} known before the agent died") for i in range(10)]
    name = pool.names[0]
    await warm(pool, name, said)
    before = pool.local.replicas[name].supervisor()
    assert before is not None
    async with traffic(clients_of(pool), lanes=3, name="while an agent dies") as seen:
        await seen.more(20)
        pool.local.kill(name, "agent")
        await eventually(lambda: _is_back(pool, name, before.agent.pid), within_s=RIGHT_AGAIN_S, what="its picture is whole")
        replies = await ask_all(pool, said)
        await seen.more(20)
    assert not seen.failures
    held = [(await pool.held(reply))[name] for reply in replies]
    assert [tokens // BLOCK for tokens in held] == [(reply.prompt - 1) // BLOCK for reply in replies], [
        r.reason for r in replies
    ]
    assert_right(replies)
    after = pool.local.replicas[name].supervisor()
    assert after is not None
    assert after.engine == before.engine, "the engine was touched"
    await pool.settled()
    assert_right(await ask_all(pool, [text(f"while an agent dies {i}", 60) for i in range(12)]))  # traffic's own prompts


async def _is_back(pool: SimPool, name: str, old: int | None) -> bool:
    """Another agent runs, and every router has its whole picture."""
    state, views = pool.local.replicas[name].supervisor(), await pool.views(name)
    another = state is not None and state.agent.pid not in (None, old)
    return another and all(view.usable and view.mode == "precise" and view.account == "whole" for view in views)


async def test_restarted_engine_has_forgotten_its_blocks__peers_1(pool: SimPool) -> None:
    said = [text(f"{i} known before the engine died") for i in range(4)]
    victim = pool.names[1]
    await warm(pool, victim, said)
    assert (await pool.held(await pool.client.chat(said[0])))[victim] > 0
    old = await pool.info(victim)
    pool.local.kill(victim, "engine")
    await pool.knows_nothing_of(victim, within_s=TOLD_S)
    assert not any(view.usable for view in await pool.views(victim))
    await pool.usable(victim)
    new = await pool.info(victim)
    assert (new.epoch > old.epoch, new.restarts) == (True, old.restarts + 1)
    for one in said:
        reply = await pool.client.chat(one)
        assert (reply.predicted, reply.cached) == (0, 0)
        assert (await pool.held(reply))[victim] == 0
    await pool.settled()
    assert_right(await ask_all(pool, said))


async def test_fresh_router_learns_what_warm_engines_hold__peers_5(pool: SimPool) -> None:
    said = [text(f"{i} known before the router started") for i in range(12)]
    name = pool.names[1]
    await warm(pool, name, said)
    old = hit_rate(await ask_all(pool, said))
    assert old > 0.9
    await pool.local.restart_router(0)
    replies = [await pool.client.chat(one) for one in said]
    assert {reply.replica for reply in replies} == {name}, "the ring alone would not send them all there"
    assert hit_rate(replies) >= 0.95 * old
    assert_right(replies)


# -- secrets


async def everything(pool: SimPool, name: str) -> None:
    """All kinds of requests, good ones and bad ones, with the marker wherever a client can put text."""
    said = text(f"{name}: everything", 40)
    tool = {"type": "function", "function": {"name": MARKER, "description": said, "parameters": {"type": "object"}}}
    call = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": MARKER, "arguments": f'{{"{MARKER}'}}]}
    good = {
        CHAT: chat(system(said), said, tools=[tool]),
        COMPLETIONS: {"prompt": said, "max_tokens": 4},
        RESPONSES: {"input": said, "instructions": said, "store": False, "max_output_tokens": 4},
        MESSAGES: chat(said, system=said),
        "/v1/messages/count_tokens": chat(said),
        "/tokenize": {"prompt": said},
    }
    for path, body in good.items():
        assert (await pool.client.post(path, body)).status == 200, path
    bad: list[Body | bytes] = [
        f'{{"messages": "{MARKER}'.encode(),
        f'{{"prompt": "{MARKER}\\ud800"}}'.encode(),
        MARKER.encode(),
        chat(text("too long", 9000)),
        chat(said, call),
        chat({"role": {MARKER: MARKER}, "content": said}),
        chat({"role": "user", "content": [{"type": MARKER, "text": said}]}),
        chat(said, max_tokens=MARKER),
        chat(said, cache_salt=MARKER, session_id=MARKER, priority=MARKER),
        {"messages": MARKER, "prompt": {MARKER: 1}, "input": [MARKER]},
    ]
    for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES):
        for one in bad:
            await pool.client.post(path, one)
            await pool.engine(pool.names[0]).post(path, one)
    async with pool.client.stream(CHAT, chat(said, max_tokens=400)) as left:
        await left.begin()  # and go away in the middle


async def test_no_prompt_is_on_any_socket_but_the_proxied_ones(pool: SimPool) -> None:
    traces = Traces(MARKER)
    async with overheard(pool) as frames, kv_events(pool) as events:
        await everything(pool, "sockets")
        await pool.settled()
    answers = {path: (await pool.agent(name).get(path)).body for name in pool.names for path in AGENT_PATHS}
    for router in pool.local.routers:
        for path in ("/state", "/explain?n=1000", names.PATH_METRICS, names.PATH_READYZ, names.PATH_HEALTHZ):
            async with pool.http.get(router.admin_url + path) as answer:
                answers[router.name + path] = await answer.read()
    told = [wire.decode_from_agent(frame) for frame in frames]
    assert any(isinstance(message, wire.Publish) for message in told), "nothing was overheard"
    assert {one: traces.found_in(data) for one, data in answers.items() if traces.found_in(data)} == {}
    assert [traces.found_in(frame) for frame in frames if traces.found_in(frame)] == []
    assert traces.found_in(b"".join(events)), "the engines' own events hold token ids: the search would have found them"
    assert listening_ports(descendants(_programs(pool))) == _known_ports(pool)


AGENT_PATHS = (names.PATH_INFO, names.PATH_DRAIN, names.PATH_METRICS, names.PATH_READYZ, names.PATH_HEALTHZ)


def _programs(pool: SimPool) -> list[int]:
    routers = [router.process.pid for router in pool.local.routers if router.process is not None]
    return [*routers, *(replica.process.pid for replica in pool.local.replicas.values())]


def _known_ports(pool: SimPool) -> set[int]:
    urls = [url for replica in pool.local.replicas.values() for url in (replica.engine_url, replica.agent_url)]
    urls += [url for router in pool.local.routers for url in (router.url, router.admin_url)]
    return {int(url.rpartition(":")[2]) for url in urls}


@asynccontextmanager
async def overheard(pool: SimPool) -> AsyncIterator[list[bytes]]:
    """Every frame that agents send to a router."""
    frames: list[bytes] = []

    async def listen(stream: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            frames.append(await stream.receive_bytes())

    tasks = []
    for name in pool.names:
        url = pool.local.replicas[name].agent_url + names.PATH_STREAM
        stream = await pool.http.ws_connect(url, headers={"authorization": f"Bearer {pool.local.engine_key}"})
        await stream.send_bytes(wire.encode(wire.Hello(router="eavesdropper")))
        tasks.append(asyncio.create_task(listen(stream)))
    try:
        yield frames
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def kv_events(pool: SimPool) -> AsyncIterator[list[bytes]]:
    """What engines tell agents over unix sockets."""
    batches: list[bytes] = []
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    socket.subscribe(b"")
    for replica in pool.local.replicas.values():
        socket.connect(f"ipc://{replica.run_dir / names.RUN_KV_PUB}")

    async def listen() -> None:
        while True:
            batches.append((await socket.recv_multipart())[-1])

    task = asyncio.create_task(listen())
    try:
        yield batches
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        context.destroy(linger=0)


async def test_no_prompt_is_in_any_log_of_the_whole_run(pool: SimPool) -> None:
    """The last test: it stops the pool, because programs also log when they end."""
    await everything(pool, "logs")
    key = pool.local.engine_key
    await pool.local.stop()
    logs = pool.logs()
    assert sorted({name.rpartition("-")[2] for name in logs}) == ["0.log", "1.log", "agent.log", "engine.log", "worker.log"]
    assert "attached to the engine" in logs["r0-agent.log"]
    assert "replica joined" in logs["router-0.log"]
    assert "ended=client_gone" in logs["router-0.log"]
    traces = Traces(MARKER)
    for name, log in logs.items():
        leaks = [line[:200] for line in log.splitlines() if traces.found_in(line.encode())]
        assert leaks == [], name
        for secret in (key, *KEYS.values(), salt_of("alpha")):
            assert secret not in log, name
