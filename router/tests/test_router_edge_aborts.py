"""Clients that go away, and the bookings and connections they leave."""

from __future__ import annotations

import asyncio
import random

import aiohttp
import pytest

from prefixpool_testing.backend import Broken, Stream, Then, as_json, event
from prefixpool_testing.edge import running_edge, until

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = CHAT | {"stream": True}
TOKEN = event({"choices": [{"index": 0, "delta": {"content": "t"}}]})


@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_a_client_that_leaves_during_prefill_frees_the_engine(body: dict[str, object]) -> None:
    async with running_edge(replicas=2) as edge:
        edge.backend.script(Broken(Then.HANG))
        asking = asyncio.ensure_future(edge.post("/v1/chat/completions", body).__aenter__())
        async with asyncio.timeout(1):
            await until(lambda: edge.backend.received)
            asking.cancel()
            await edge.backend.received[0].gone.wait()
            await edge.last.ended.wait()
        assert edge.last.outcome is not None
        assert (edge.last.outcome.status, edge.last.outcome.aborted) == (499, True)
        assert len(edge.backends[1].received) == 0
        assert edge.metric("requests_total", api="chat", status="499") == 1


async def test_a_client_that_leaves_in_mid_stream_frees_the_engine() -> None:
    async with running_edge() as edge:
        edge.backend.script(Stream(TOKEN, then=Then.HANG))
        async with edge.post("/v1/chat/completions", STREAM) as response:
            assert (await response.content.readchunk())[0] == TOKEN
            response.close()
        async with asyncio.timeout(1):
            await edge.backend.received[0].gone.wait()
            await edge.last.ended.wait()
        assert edge.last.outcome is not None
        assert (edge.last.outcome.status, edge.last.outcome.aborted) == (200, True)


async def test_a_client_that_leaves_while_it_waits_for_a_place_is_forgotten() -> None:
    async with running_edge(max_inflight=1) as edge:
        edge.backend.script(Broken(Then.HANG))
        first = asyncio.ensure_future(edge.post("/v1/chat/completions", CHAT).__aenter__())
        async with asyncio.timeout(1):
            await until(lambda: edge.backend.received)
            second = asyncio.ensure_future(edge.post("/v1/chat/completions", CHAT).__aenter__())
            await until(lambda: edge.metric("waiting_requests") == 1)
            second.cancel()
            await until(lambda: edge.metric("waiting_requests") == 0)
            first.cancel()
            async with edge.post("/v1/chat/completions", CHAT) as response:
                assert response.status == 200
        assert len(edge.dispatcher.dispatches) == 2


async def test_after_many_random_aborts_nothing_is_left() -> None:
    """peers 30, 34: in-flight counts leaked on disconnects."""
    chance = random.Random(1)
    async with running_edge(replicas=2, max_inflight=64) as edge:
        for backend in edge.backends:
            backend.default = Stream(*[TOKEN] * 20)

        async def ask(session: aiohttp.ClientSession) -> None:
            asking = edge.post("/v1/chat/completions", STREAM)
            try:
                async with asyncio.timeout(chance.random() * 0.03), asking as response:
                    await response.read()
            except TimeoutError:
                pass

        for _ in range(10):
            await asyncio.gather(*(ask(edge.client) for _ in range(50)))
        async with asyncio.timeout(2):
            await asyncio.gather(*(dispatch.ended.wait() for dispatch in edge.dispatcher.dispatches))
            await until(lambda: not edge.edge.open_requests)
        assert edge.metric("waiting_requests") == 0
        for _ in range(2):  # all 64 places are there again
            replies = await asyncio.gather(*(edge.post("/v1/chat/completions", STREAM).__aenter__() for _ in range(64)))
            assert {reply.status for reply in replies} == {200}
            for reply in replies:
                await reply.read()


async def test_connections_to_engines_are_used_again() -> None:
    async with running_edge() as edge:
        edge.backend.default = as_json({"ok": 1})
        for _ in range(5):
            async with edge.post("/v1/chat/completions", CHAT) as response:
                await response.read()
        assert edge.backend.connections == 1
