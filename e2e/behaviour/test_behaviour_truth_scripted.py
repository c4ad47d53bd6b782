"""What only scripted agents and engines can show: floods that come late, pictures that take long, usage that is not told."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from prefixpool import wire
from prefixpool.chain import canonical, prefix_chain
from prefixpool_cli.pool_spec import MemberRow
from prefixpool_router.settings import RouterSettings
from prefixpool_testing.backend import Backend, Stream, as_json, event
from prefixpool_testing.eventually import eventually
from prefixpool_testing.fake_agent import FakeAgent
from prefixpool_testing.pool_client import CHAT, MESSAGES, PoolClient, chat
from prefixpool_testing.router_here import explanation, router_here
from prefixpool_testing.router_program import router_program

MODEL = "model"
SAID = "a prompt that every one of them may hold " * 100
FRAMES = 1000
PROMPT_TOKENS = 1024


def boundaries(said: str) -> tuple[list[int], list[int]]:
    """Hashes and token depths of a chat, as an agent would tell them; 4 bytes a token."""
    request = canonical(CHAT, {"model": MODEL, **chat(said)}, template=wire.Template())
    assert request is not None
    chain = prefix_chain(request)
    return list(chain.hashes), [offset // 4 for offset in chain.offsets]


def answer(usage: dict[str, Any]) -> dict[str, Any]:
    """Of chats and messages alike."""
    message = {"role": "assistant", "content": "hi"}
    content = [{"type": "text", "text": "hi"}]
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "content": content, "usage": usage}


@pytest.fixture
async def engine() -> AsyncIterator[Backend]:
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
    async with Backend(as_json(answer(usage))) as backend:
        yield backend


@pytest.fixture
async def agents() -> AsyncIterator[list[FakeAgent]]:
    both = [FakeAgent("p-0"), FakeAgent("p-1")]
    for agent in both:
        await agent.start()
    yield both
    for agent in both:
        await agent.stop()


# -- membership


async def test_removed_replica_leaves_nothing_however_much_it_still_sends__peers_4(
    tmp_path: Path, engine: Backend, agents: list[FakeAgent]
) -> None:
    gone, stays = agents
    rows = [MemberRow(agent.replica, engine.url, agent.url) for agent in agents]
    hashes, depths = boundaries(SAID)
    async with router_program(tmp_path, rows) as router:
        await gone.hold(hashes, depths)

        async def credited() -> bool:
            view = await router.view(gone.replica)
            return view is not None and view.boundaries == len(hashes)

        await eventually(credited, what="the router knows what the replica holds")
        os.kill(router.process.pid, signal.SIGSTOP)  # it will find the flood and the removal at once
        try:
            async with asyncio.timeout(20):
                for i in range(FRAMES):
                    await gone.hold([(i << 20) + j for j in range(8)], [32 * (j + 1) for j in range(8)])
            router.tell([rows[1]])
        finally:
            os.kill(router.process.pid, signal.SIGCONT)

        async def forgotten() -> bool:
            report = await router.report()
            return [view.name for view in report.replicas] == [stays.replica] and report.index_boundaries == 0

        await eventually(forgotten, what="the index holds nothing of it")
        reply = await router.client.chat(SAID)
        assert (reply.replica, reply.predicted) == (stays.replica, 0)
        gone.resident = {wire.Tier.DEVICE: {}}
        router.tell(rows)
        await router.until(gone.replica, usable=True, mode="precise", within_s=20)
        back = await router.view(gone.replica)
        assert back is not None
        assert (back.boundaries, back.account) == (0, "whole"), "another replica of that name inherits nothing"


# -- fresh routers


async def test_fresh_router_says_it_is_warming_until_it_has_every_picture__peers_5(
    engine: Backend, agents: list[FakeAgent]
) -> None:
    _, slow = agents
    slow.hold_snapshots = True
    hashes, depths = boundaries(SAID)
    await slow.hold(hashes, depths)
    flags = tuple(part for agent in agents for part in (f"{agent.replica}={engine.url}", agent.url))
    settings = RouterSettings(replica=flags, port=0, admin_port=0, drain_accept_s=0, warmup_s=60)
    async with router_here(settings) as router, aiohttp.ClientSession() as http:

        async def one_is_known() -> bool:
            return {view.name: view.account for view in router.report().replicas} == {"p-0": "whole", "p-1": "warming"}

        await eventually(one_is_known, what="one picture is there, the other begun")
        assert router.readiness() == (False, "warming: waiting for the pictures of 1 of 2 replicas")
        await slow.release_snapshots()
        await eventually(lambda: _ready(router), what="the router is ready")
        reply = await PoolClient(http, f"http://127.0.0.1:{router.edge.port}", "", MODEL).chat(SAID)
        assert (reply.replica, reply.reason) == (slow.replica, "warm")
        assert reply.predicted > 0


async def _ready(router: Any) -> bool:
    return bool(router.readiness().ready)


# -- usage that is not told

SILENT: dict[str, dict[str, Any]] = {
    "no details": {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 1},
    "null details": {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 1, "prompt_tokens_details": None},
    "null figure": {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": None},
    },
    "messages": {"input_tokens": PROMPT_TOKENS, "output_tokens": 1},
}


@pytest.mark.parametrize("what", SILENT)
@pytest.mark.parametrize("streamed", [False, True])
async def test_figure_that_an_engine_does_not_tell_is_unknown_not_zero__peers_82(
    engine: Backend, agents: list[FakeAgent], what: str, streamed: bool
) -> None:
    holder = agents[0]
    usage = SILENT[what]
    path = MESSAGES if what == "messages" else CHAT
    engine.default = _stream(path, usage) if streamed else as_json(answer(usage))
    await holder.hold(*boundaries(SAID))
    settings = RouterSettings(replica=(f"p-0={engine.url}", holder.url), port=0, admin_port=0, drain_accept_s=0)
    async with router_here(settings) as router, aiohttp.ClientSession() as http:
        await eventually(lambda: _ready(router), what="the router is ready")
        client = PoolClient(http, f"http://127.0.0.1:{router.edge.port}", "", MODEL)
        replies = [await client.post(path, chat(SAID, stream=streamed)) for _ in range(30)]  # 30 zeros would cost all trust
        assert all(reply.status == 200 and reply.predicted > 0 for reply in replies)
        assert not any("x-prefixpool-cached-tokens" in reply.headers for reply in replies)
        outcome = explanation(router, replies[-1].request_id).outcome
        assert outcome is not None
        assert (outcome.prompt_tokens, outcome.cached_tokens) == (PROMPT_TOKENS, None)
        (view,) = router.report().replicas
        assert (view.trust, view.prediction_error, view.drifted) == (1.0, 0.0, False)
        assert router.registry.get_sample_value("prefixpool_router_cached_tokens_total", {"replica": "p-0"}) in (None, 0.0)


async def test_zero_that_an_engine_tells_is_zero__peers_82(engine: Backend, agents: list[FakeAgent]) -> None:
    holder = agents[0]
    await holder.hold(*boundaries(SAID))
    settings = RouterSettings(replica=(f"p-0={engine.url}", holder.url), port=0, admin_port=0, drain_accept_s=0)
    async with router_here(settings) as router, aiohttp.ClientSession() as http:
        await eventually(lambda: _ready(router), what="the router is ready")
        client = PoolClient(http, f"http://127.0.0.1:{router.edge.port}", "", MODEL)
        replies = [await client.post(CHAT, chat(SAID)) for _ in range(30)]
        assert {reply.headers["x-prefixpool-cached-tokens"] for reply in replies} == {"0"}
        (view,) = router.report().replicas
        assert view.drifted, "it was wrong thirty times"


def _stream(path: str, usage: dict[str, Any]) -> Stream:
    if path == MESSAGES:
        events = [
            ("message_start", {"type": "message_start", "message": {"usage": usage}}),
            ("content_block_delta", {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "hi"}}),
            ("message_delta", {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage}),
            ("message_stop", {"type": "message_stop"}),
        ]
        return Stream(*(event(value, name) for name, value in events))
    chunks: list[Any] = [{"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": "stop"}]}]
    return Stream(*map(event, [*chunks, {"choices": [], "usage": usage}]), event(b"[DONE]"))
