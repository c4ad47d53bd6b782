"""Answers that are silent while their engine is known to be out of reach: nobody waits for them until the long deadline."""

from __future__ import annotations

import asyncio

import pytest

from prefixpool_router import watchdog
from prefixpool_router.dispatch_types import RoutedRequest
from prefixpool_router.failures import LostError, UnansweredError
from prefixpool_router.watchdog import LOOK_S, Watchdog
from prefixpool_testing.backend import Broken, Stream, Then, as_json, event
from prefixpool_testing.edge import EdgeUnderTest, FakeDispatch, running_edge, until

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TOKEN = event({"choices": [{"index": 0, "delta": {"content": "t"}}]})


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LOOK_S", 0.05)


async def begun(edge: EdgeUnderTest) -> None:
    await until(lambda: edge.backends[0].received)


@pytest.mark.usefixtures("looks_often")
async def test_a_request_without_answer_goes_elsewhere() -> None:
    async with running_edge(replicas=2) as edge:
        edge.backends[0].script(Broken(Then.HANG))
        edge.backends[1].script(as_json({"ok": 1}))
        asking = asyncio.ensure_future(edge.post("/v1/chat/completions", CHAT).__aenter__())
        await begun(edge)
        edge.dispatcher.dispatches[0].lost = True
        async with await asking as response:
            assert (response.status, await response.json()) == (200, {"ok": 1})
        assert edge.dispatcher.dispatches[0].abandoned == ("lost", False)


@pytest.mark.usefixtures("looks_often")
async def test_a_stream_ends_with_an_error_event() -> None:
    async with running_edge(replicas=2) as edge:
        edge.backends[0].script(Stream(TOKEN, then=Then.HANG))
        async with edge.post("/v1/chat/completions", CHAT | {"stream": True}) as response:
            assert (await response.content.readchunk())[0] == TOKEN
            edge.last.lost = True
            rest = await response.read()
        assert b"The engine broke off in the middle of its answer." in rest
        assert edge.metric("broken_streams_total", why="lost") == 1
        assert edge.last.outcome is not None
        assert edge.last.outcome.error == "stream broken: lost"


@pytest.mark.looptime(start=0)
async def test_an_answer_that_goes_on_is_left_alone_and_silence_alone_is_waited_for() -> None:
    failures: list[UnansweredError] = []
    dispatch = FakeDispatch("p-0", "", RoutedRequest(path="/v1/completions"))
    dog = Watchdog(dispatch, read_s=600, write_s=60, give_up=failures.append, cut_off=lambda: None)
    dog.reading()
    await asyncio.sleep(100)
    dispatch.lost = True
    for _ in range(100):  # it is out of reach for new requests, but this one gets its tokens
        dog.reading()
        await asyncio.sleep(0.9 * LOOK_S)
    assert not failures
    await asyncio.sleep(2 * LOOK_S)
    assert [type(failure) for failure in failures] == [LostError]
    dog.close()


@pytest.mark.looptime(start=0)
async def test_a_lost_engine_is_no_reason_to_hurry_a_slow_client() -> None:
    dispatch = FakeDispatch("p-0", "", RoutedRequest(path="/v1/completions"))
    dispatch.lost = True
    ends: list[object] = []
    dog = Watchdog(dispatch, read_s=600, write_s=60, give_up=ends.append, cut_off=lambda: ends.append("cut off"))
    dog.writing()
    await asyncio.sleep(59)
    assert not ends
    await asyncio.sleep(2)
    assert ends == ["cut off"]
    dog.close()
