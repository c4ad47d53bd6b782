"""When another replica is tried, when not, and how a broken answer ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest

from prefixpool.errors import RequestError
from prefixpool.names import H_REPLICA
from prefixpool_testing.backend import Answer, Broken, Raw, Scripted, Stream, Then, as_json, busy, event, fenced
from prefixpool_testing.edge import EdgeUnderTest, running_edge

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = CHAT | {"stream": True}
TOKEN = event({"choices": [{"index": 0, "delta": {"content": "t"}}]})
ROLE = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
ABORT = event({"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "abort"}]})
DONE = event(b"[DONE]")
SHUT_DOWN = as_json({"error": {"message": "cannot schedule new futures after shutdown", "code": 500}}, 500)
UNAUTHORISED = Answer(
    b'{"error":{"message":"Incorrect API key provided: sk-1234","code":401}}',
    401,
    {"Content-Type": "application/json", "WWW-Authenticate": "Bearer"},
)
ABORTED = as_json(
    {"choices": [{"text": "", "finish_reason": "abort"}], "usage": {"prompt_tokens": 9, "completion_tokens": 0}}
)
CUT_SHORT = as_json(
    {
        "choices": [{"text": "half of what", "finish_reason": "abort"}, {"text": "whole.", "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 7},
    }
)
NO_CHOICE = as_json({"choices": [], "usage": {"prompt_tokens": 0, "completion_tokens": 0}})
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"


def asked(edge: EdgeUnderTest) -> list[int]:
    return [len(backend.received) for backend in edge.backends]


@pytest.mark.parametrize(
    ("first", "why", "down", "body"),
    [
        (fenced(), "fenced", False, CHAT),
        (fenced(), "fenced", False, STREAM),
        (busy(), "busy", False, STREAM),
        (Answer(b"engine is currently busy", 503), "busy", False, CHAT),
        (SHUT_DOWN, "shutdown", False, STREAM),
        (UNAUTHORISED, "key_refused", False, CHAT),
        (UNAUTHORISED, "key_refused", False, STREAM),
        (ABORTED, "empty", False, CHAT),
        (CUT_SHORT, "empty", False, CHAT),
        (NO_CHOICE, "empty", False, CHAT),
        (Stream(DONE), "empty", False, STREAM),
        (Stream(), "empty", False, STREAM),
        (Stream(ABORT, DONE), "empty", False, STREAM),
        (Stream(ROLE, ABORT, DONE), "empty", False, STREAM),
        (Stream(ROLE + ABORT + DONE), "empty", False, STREAM),
        (Stream(ROLE, DONE), "empty", False, STREAM),
        (Stream(event(SHUT_DOWN.body), DONE), "empty", False, STREAM),
        (Broken(Then.RESET), "reset", True, CHAT),
        (Broken(Then.CLOSE), "reset", True, STREAM),
        (Stream(then=Then.RESET), "reset", True, STREAM),
        (Raw(HEAD + b'{"half":', then=Then.CLOSE), "reset", True, CHAT),
        (Raw(b"nonsense\r\n\r\n"), "reset", True, CHAT),
        (Raw(b"HTTP/1.1 000 X\r\nContent-Length: 2\r\n\r\n{}"), "reset", True, CHAT),  # clients got `HTTP/1.1 0 X`
    ],
)
async def test_another_replica_answers_when_nothing_reached_the_client(
    first: Scripted, why: str, down: bool, body: Any
) -> None:
    async with running_edge(replicas=2) as edge:
        good = Stream(TOKEN, DONE) if "stream" in body else as_json({"ok": 1})
        edge.backends[0].script(first)
        edge.backends[1].script(good)
        async with edge.post("/v1/chat/completions", body) as response:
            assert (response.status, response.headers[H_REPLICA]) == (200, "p-1")
            assert await response.read() == (TOKEN + DONE if "stream" in body else b'{"ok":1}')
        assert asked(edge) == [1, 1]
        assert edge.backends[0].received[0].body == edge.backends[1].received[0].body
        assert edge.dispatcher.dispatches[0].abandoned == (why, down)
        assert edge.dispatcher.open_before == [0, 0]  # the first booking was gone before the second was made
        assert edge.last.outcome is not None
        assert edge.last.outcome.status == 200


@pytest.mark.parametrize("code", [400, 500])
async def test_an_error_at_the_beginning_of_a_stream_went_to_all_replicas_and_was_lost(code: int) -> None:
    """vLLM checks some of a streamed request behind its 200, and tells by an event what is wrong with it."""
    error = event(msgspec.json.encode({"error": {"message": "Requested 99 logprobs", "code": code}}))
    async with running_edge(replicas=2) as edge:
        edge.backends[0].script(Stream(error, DONE))
        async with edge.post("/v1/chat/completions", STREAM) as response:
            assert (response.status, await response.read()) == (200, error + DONE)
        assert asked(edge) == [1, 0]


async def test_a_refused_connection_is_a_replica_down() -> None:
    async with running_edge(replicas=3) as edge:
        await edge.backends[0].close()
        await edge.backends[1].close()
        async with edge.post("/v1/embeddings", {"input": "x"}) as response:
            assert (response.status, response.headers[H_REPLICA]) == (200, "p-2")
        assert [d.abandoned for d in edge.dispatcher.dispatches] == [("refused", True), ("refused", True), None]


async def test_the_engine_may_answer_before_it_has_read_a_large_body() -> None:
    async with running_edge(replicas=2) as edge:
        edge.backends[0].script(
            Raw(b"HTTP/1.1 503 busy\r\nx-prefixpool-busy: 1\r\nContent-Length: 0\r\n\r\n", read_body=False)
        )
        body = {"prompt": "x" * 2_000_000}
        async with edge.post("/v1/completions", body) as response:
            assert (response.status, response.headers[H_REPLICA]) == (200, "p-1")
        assert edge.backends[1].received[0].json() == body


async def test_when_all_are_busy_the_client_is_told_to_come_back() -> None:
    async with running_edge(replicas=2) as edge:
        for backend in edge.backends:
            backend.default = busy()
        async with edge.post("/v1/chat/completions", CHAT) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
            assert (await response.json())["error"]["message"] == "No replica could take the request (2 tried: busy)."
        async with edge.post("/v1/messages", CHAT) as response:
            assert (await response.json())["error"]["type"] == "overloaded_error"
        assert asked(edge) == [2, 2]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/models", "/v1/other"])
async def test_engines_that_refused_the_routers_key_looked_as_if_the_clients_were_wrong(path: str) -> None:
    async with running_edge(replicas=2) as edge:
        for backend in edge.backends:
            backend.default = UNAUTHORISED
        asking = edge.client.get(edge.url + path) if path == "/v1/models" else edge.post(path, CHAT)
        async with asking as response:
            assert response.status == 502
            assert "WWW-Authenticate" not in response.headers
            error = (await response.json())["error"]
        assert "your own key is not in question" in error["message"]
        assert "--engine-key-file" in error["message"]
        assert "sk-1234" not in error["message"]
        if path == "/v1/messages":
            assert error["type"] == "api_error"
        else:
            assert (error["type"], error["code"]) == ("server_error", "engine_key_refused")
        assert asked(edge) == [1, 1]
        assert [d.abandoned for d in edge.dispatcher.dispatches] == [("key_refused", False)] * 2


async def test_a_refused_key_is_told_of_a_body_that_cannot_be_sent_twice_too() -> None:
    async with running_edge(replicas=2) as edge:
        edge.backends[0].script(UNAUTHORISED)

        async def pieces() -> AsyncIterator[bytes]:
            yield b"x" * 1000

        async with edge.client.post(f"{edge.url}/v1/audio", data=pieces()) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (502, "engine_key_refused")
        assert asked(edge) == [1, 0]


async def test_a_request_that_kills_engines_does_not_kill_them_all() -> None:
    async with running_edge(replicas=3) as edge:
        for backend in edge.backends:
            backend.default = Broken(Then.RESET)
        async with edge.post("/v1/chat/completions", CHAT) as response:
            assert response.status == 502
        assert asked(edge) == [1, 1, 0]


async def test_a_silent_engine_is_a_504_and_is_not_retried() -> None:
    async with running_edge(replicas=2, silence_timeout_s=0.05) as edge:
        edge.backend.script(Broken(Then.HANG), Stream(then=Then.HANG))
        for body in (CHAT, STREAM):
            async with edge.post("/v1/chat/completions", body) as response:
                assert response.status == 504
        assert asked(edge) == [2, 0]
        async with asyncio.timeout(1):
            await edge.backend.received[0].gone.wait()  # the engine is let go, too
            await edge.backend.received[1].gone.wait()


@pytest.mark.parametrize("status", [404, 503])
async def test_a_refusal_of_the_dispatcher_is_passed_on(status: int) -> None:
    async with running_edge() as edge:
        edge.dispatcher.refusal = RequestError(status, "as it says", code="c", retry_after_s=3)
        async with edge.post("/v1/chat/completions", CHAT) as response:
            assert response.status == status
            assert response.headers["Retry-After"] == "3"
            assert (await response.json())["error"]["code"] == "c"
        assert asked(edge) == [0]


@pytest.mark.parametrize("then", [Then.RESET, Then.CLOSE])
async def test_a_stream_that_breaks_ends_with_an_error_event_and_is_not_replayed(then: Then) -> None:
    async with running_edge(replicas=2) as edge:
        edge.backend.script(Stream(TOKEN, TOKEN, then=then))
        async with edge.post("/v1/chat/completions", STREAM) as response:
            events = (await response.read()).split(b"\n\n")
        assert response.status == 200
        assert events[0] + b"\n\n" == TOKEN
        assert msgspec.json.decode(events[-2].removeprefix(b"data: "))["error"]["type"] == "server_error"
        assert DONE.strip() not in events
        assert asked(edge) == [1, 0]
        assert edge.last.outcome is not None
        assert (edge.last.outcome.error, edge.last.outcome.aborted) == ("stream broken: reset", False)
        assert edge.metric("broken_streams_total", why="reset") == 1


async def test_a_broken_anthropic_stream_ends_in_its_dialect() -> None:
    async with running_edge() as edge:
        edge.backend.script(Stream(event({"type": "message_start"}, "message_start"), then=Then.RESET))
        async with edge.post("/v1/messages", STREAM) as response:
            last = (await response.read()).split(b"\n\n")[-2]
        assert last.startswith(b'event: error\ndata: {"type":"error"')


async def test_an_event_cut_in_half_does_not_swallow_the_error_event() -> None:
    gate = asyncio.Event()
    async with running_edge() as edge:
        edge.backend.script(Stream(TOKEN, b'data: {"choices":[{"ind', gate, then=Then.RESET))
        async with edge.post("/v1/chat/completions", STREAM) as response:
            assert (await response.content.readchunk())[0] == TOKEN
            assert (await response.content.readchunk())[0] == b'data: {"choices":[{"ind'
            gate.set()
            assert (await response.read()).startswith(b'\n\ndata: {"error"')


async def test_an_engine_that_falls_silent_in_the_middle_ends_the_stream() -> None:
    async with running_edge(silence_timeout_s=0.05) as edge:
        edge.backend.script(Stream(TOKEN, then=Then.HANG))
        async with edge.post("/v1/chat/completions", STREAM) as response:
            assert b"fell silent" in await response.read()
        assert edge.last.outcome is not None
        assert edge.last.outcome.error == "stream broken: timeout"
        async with asyncio.timeout(1):
            await edge.backend.received[0].gone.wait()


async def test_other_bodies_that_break_are_cut_off_visibly() -> None:
    async with running_edge() as edge:
        edge.backend.script(Stream(b"RIFF", then=Then.RESET, headers={"Content-Type": "audio/wav"}))
        with pytest.raises(aiohttp.ClientError):
            async with edge.post("/v1/audio/speech", {"input": "x"}) as response:
                await response.read()
        async with asyncio.timeout(1):
            await edge.last.ended.wait()
        assert edge.last.outcome is not None
        assert edge.last.outcome.error == "stream broken: reset"


async def test_a_body_on_its_way_is_not_sent_twice() -> None:
    async def upload() -> Any:
        yield b"x" * 10
        await asyncio.sleep(0.03)
        yield b"y" * 10

    async with running_edge(replicas=2) as edge:
        edge.backend.script(Broken(Then.RESET))
        async with edge.client.post(edge.url + "/v1/audio/transcriptions", data=upload()) as response:
            assert response.status == 502
        assert asked(edge) == [1, 0]
        edge.backend.script(busy())  # a short one was kept
        async with edge.post("/v1/audio/transcriptions", b"short") as response:
            assert (response.status, response.headers[H_REPLICA]) == (200, "p-1")
