"""Requests that find every replica full wait for room, in order, for a while; nobody is refused what can be done."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from prefixpool.errors import RequestError
from prefixpool_router.waiting_room import WaitingRoom
from prefixpool_testing.backend import Raw, as_json, busy
from prefixpool_testing.edge import EdgeUnderTest, running_edge, until

BUSY = b"HTTP/1.1 503 Busy\r\nx-prefixpool-busy: 1\r\nContent-Length: 0\r\n\r\n"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def ask(edge: EdgeUnderTest, **fields: Any) -> asyncio.Future[aiohttp.ClientResponse]:
    return asyncio.ensure_future(edge.post("/v1/chat/completions", CHAT | fields).__aenter__())


async def waiting(edge: EdgeUnderTest, requests: int) -> None:
    await until(lambda: edge.metric("waiting_requests") == requests)


async def test_requests_wait_for_room_and_get_it_in_order_of_arrival() -> None:
    async with running_edge() as edge:
        edge.dispatcher.full = {"p-0"}
        asking = []
        for number in range(3):
            asking.append(ask(edge, seed=number))
            await waiting(edge, number + 1)
        edge.dispatcher.wake(3)  # and somebody else takes it
        await asyncio.sleep(0)
        await waiting(edge, 3)
        edge.dispatcher.full = set()
        for number in range(3):
            edge.dispatcher.wake(1)
            async with await asking[number] as response:
                assert response.status == 200
            await waiting(edge, 2 - number)
        assert [received.json()["seed"] for received in edge.backend.received] == [0, 1, 2]


async def test_waiting_for_room_has_a_deadline_and_a_bound() -> None:
    async with running_edge(queue_timeout_s=0.2, max_queued=1) as edge:
        edge.dispatcher.full = {"p-0"}
        first = ask(edge)
        await waiting(edge, 1)
        async with await ask(edge) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "1")
            assert "queue" in (await response.json())["error"]["message"]
        async with await first as response:
            assert response.status == 429
            assert "in time" in (await response.json())["error"]["message"]
        await waiting(edge, 0)


async def test_a_client_that_leaves_hands_its_room_on() -> None:
    room = WaitingRoom(most=2)
    deadline_s = asyncio.get_running_loop().time() + 10
    first = asyncio.create_task(room.until(lambda: "first", kind="", deadline_s=deadline_s))
    await asyncio.sleep(0)
    second = asyncio.create_task(room.until(lambda: "second", kind="", deadline_s=deadline_s))
    await asyncio.sleep(0)
    room.wake(1)
    first.cancel()
    assert await second == "second"
    assert first.cancelled()
    assert room.waiting == 0


async def test_a_client_that_leaves_while_it_waits_is_forgotten() -> None:
    async with running_edge() as edge:
        edge.dispatcher.full = {"p-0"}
        asking = ask(edge)
        await waiting(edge, 1)
        asking.cancel()
        await waiting(edge, 0)
        assert not edge.dispatcher.dispatches


async def test_when_nobody_is_left_to_wait_for_the_client_is_told_so() -> None:
    async with running_edge() as edge:
        edge.dispatcher.full = {"p-0"}
        asking = ask(edge)
        await waiting(edge, 1)
        edge.dispatcher.refusal = RequestError(503, "No replica can take this request now.", retry_after_s=1)
        edge.dispatcher.wake(1)
        async with await asking as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")


async def test_who_waits_for_another_model_is_in_nobodys_way() -> None:
    async with running_edge() as edge:
        edge.dispatcher.full = {"p-0"}
        asking = [ask(edge, model="a"), ask(edge, model="b")]
        await waiting(edge, 2)
        edge.dispatcher.full = set()
        edge.dispatcher.wake(1)
        for each in asking:
            async with await each as response:
                assert response.status == 200


async def test_a_gate_that_was_faster_than_the_count_costs_a_wait_not_an_error() -> None:
    async with running_edge(replicas=2) as edge:
        slow = asyncio.Event()
        edge.backends[0].script(busy())
        edge.backends[1].script(Raw(slow, BUSY))
        edge.backends[0].default = as_json({"at": "last"})
        dispatches = edge.dispatcher.dispatches
        asking = ask(edge)
        await until(lambda: len(dispatches) == 2)
        edge.dispatcher.full = {"p-0", "p-1"}  # as the real one concludes from a busy gate
        slow.set()
        await waiting(edge, 1)
        edge.dispatcher.full = set()
        edge.dispatcher.wake(1)
        async with await asking as response:
            assert await response.json() == {"at": "last"}
        assert [dispatch.replica for dispatch in dispatches] == ["p-0", "p-1", "p-0"]
