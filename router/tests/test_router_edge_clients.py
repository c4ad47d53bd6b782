"""Clients with bad input or bad manners: a clear refusal or a closed connection, bounded memory, nobody else harmed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest
from aiohttp import web

from prefixpool.names import H_REQUEST_ID
from prefixpool_router.server import ClientServer
from prefixpool_testing.backend import Broken, Stream, Then, as_json, event
from prefixpool_testing.edge import running_edge, until

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """Until the other side closes, however it does."""
    got = b""
    async with asyncio.timeout(3):
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(1 << 16):
                got += piece
    return got


@pytest.mark.parametrize(
    "raw",
    [b"{", b"[]", b'{"a":"\xff"}', b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"],
    ids=["json", "list", "utf8", "deep"],
)
async def test_bad_bodies_are_a_400_in_both_dialects(raw: bytes) -> None:
    async with running_edge() as edge:
        async with edge.post("/v1/chat/completions", raw) as response:
            assert response.status == 400
            error = (await response.json())["error"]
            assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, None)
            assert response.headers[H_REQUEST_ID]
        async with edge.post("/v1/messages", raw) as response:
            assert response.status == 400
            assert (await response.json())["error"]["type"] == "invalid_request_error"
        assert not edge.dispatcher.dispatches
        async with edge.post("/v1/chat/completions", CHAT) as response:  # on the same connection
            assert response.status == 200


async def test_a_declared_length_beyond_the_limit_is_refused_before_the_body() -> None:
    async with running_edge(max_body_bytes=1024) as edge:
        reader, writer = await edge.connect()
        writer.write(HEAD + b"Content-Length: 1000000\r\nExpect: 100-continue\r\n\r\n")
        answer = await read_all(reader)
        assert answer.startswith(b"HTTP/1.1 413")
        assert b"larger than 1024 bytes" in answer
        assert b"100 Continue" not in answer


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/files"])
async def test_a_body_without_length_is_cut_off_at_the_limit(path: str) -> None:
    async def endless() -> Any:
        while True:
            yield b" " * 1000

    async with running_edge(max_body_bytes=100_000) as edge:
        try:
            async with edge.client.post(edge.url + path, data=endless()) as response:
                assert response.status == 413
        except aiohttp.ClientOSError:
            pass  # the answer was lost because we went on sending: allowed, a closed connection is as clear
        await until(lambda: not edge.edge.open_requests)
        assert edge.metric("rejected_requests_total", status="413") == 1


async def test_a_short_body_without_length_is_held_to_the_limit_too() -> None:
    async with running_edge(max_body_bytes=1024) as edge:
        reader, writer = await edge.connect()
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n7d0\r\n" + b" " * 2000 + b"\r\n0\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 413")


async def test_clients_that_ask_before_they_send_are_told_to_go_on() -> None:
    async with running_edge() as edge:
        reader, writer = await edge.connect()
        writer.write(HEAD + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"{}")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")


async def test_a_request_behind_a_body_that_was_never_sent_was_taken_for_that_body() -> None:
    async with running_edge() as edge:
        reader, writer = await edge.connect()
        writer.write(b"POST /no/such/path HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 404")
        assert b"connection: close" in head.lower()  # so the client sends what follows on another one


async def test_an_http_1_0_client_got_an_interim_answer_that_it_does_not_know() -> None:
    async with running_edge() as edge:
        reader, writer = await edge.connect()
        writer.write(HEAD.replace(b"1.1", b"1.0") + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        await until(lambda: edge.edge.open_requests)
        writer.write(b"{}")
        assert (await reader.readline()).startswith(b"HTTP/1.0 200")


async def test_compressed_bodies_are_refused() -> None:
    async with running_edge() as edge, edge.post("/v1/completions", b"x", headers={"Content-Encoding": "gzip"}) as response:
        assert response.status == 415


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/audio/transcriptions"])
@pytest.mark.parametrize("coding", ["gzip, chunked", "GZIP,chunked", "x-\xe9, chunked"])
async def test_a_body_in_another_transfer_coding_reached_engines_as_garbage(path: str, coding: str) -> None:
    async with running_edge() as edge:
        reader, writer = await edge.connect()
        fields = f"Host: x\r\nTransfer-Encoding: {coding}\r\n\r\n".encode("latin-1")
        writer.write(f"POST {path} HTTP/1.1\r\n".encode() + fields + b"2\r\n{}\r\n0\r\n\r\n")
        answer = await read_all(reader)  # the connection ends with it
        assert answer.startswith(b"HTTP/1.1 501 ")
        assert b"must not be encoded for transfer" in answer
        assert edge.backend.received == []


@pytest.mark.parametrize("coding", [b"chunked", b"Chunked", b" chunked "])
async def test_chunked_bodies_are_taken_however_it_is_spelt(coding: bytes) -> None:
    async with running_edge() as edge:
        reader, writer = await edge.connect()
        fields = b"Host: x\r\nConnection: close\r\nTransfer-Encoding: " + coding + b"\r\n\r\n"
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\n" + fields + b"2\r\n{}\r\n0\r\n\r\n")
        assert (await read_all(reader)).startswith(b"HTTP/1.1 200 ")


async def test_a_body_that_trickles_in_has_a_deadline() -> None:
    async with running_edge(body_timeout_s=0.1) as edge:
        reader, writer = await edge.connect()
        writer.write(HEAD + b"Content-Length: 1000\r\n\r\n")

        async def trickle() -> None:
            with contextlib.suppress(ConnectionError):
                while not writer.transport.is_closing():
                    writer.write(b" ")
                    await writer.drain()
                    await asyncio.sleep(0.01)

        async with asyncio.TaskGroup() as group:
            trickling = group.create_task(trickle())
            answer = await read_all(reader)
            trickling.cancel()
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"connection: close" in answer.lower()


async def test_a_head_that_trickles_in_is_cut_off() -> None:
    async with running_edge(idle_timeout_s=0.1) as edge:
        reader, writer = await edge.connect()
        started = time.monotonic()
        for byte in HEAD:
            if reader.at_eof() or writer.transport.is_closing():
                break
            writer.write(bytes([byte]))
            await asyncio.sleep(0.002)
        assert await read_all(reader) == b""
        assert time.monotonic() - started < 3


@pytest.mark.parametrize(
    "lines",
    [b"X: " + b"a" * 10_000_000 + b"\r\n", b"".join(b"X-%d: a\r\n" % i for i in range(500_000))],
    ids=["long", "many"],
)
async def test_ten_megabytes_of_headers(lines: bytes) -> None:
    async with running_edge() as edge:
        reader, writer = await edge.connect()
        with contextlib.suppress(ConnectionError):
            writer.write(HEAD + lines + b"\r\n")
            answer = await read_all(reader)
            assert not answer or answer.startswith((b"HTTP/1.1 431", b"HTTP/1.0 431"))
        async with edge.post("/v1/chat/completions", CHAT) as response:
            assert response.status == 200
        assert len(edge.dispatcher.dispatches) == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /v1/models\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHo st: x\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_refused_and_not_logged(raw: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with running_edge() as edge:
        reader, writer = await edge.connect()
        writer.write(raw)
        answer = await read_all(reader)
        assert answer == b"" or answer.split()[1] in (b"400", b"505")
        assert not edge.dispatcher.dispatches
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


async def test_what_follows_garbage_is_not_parsed() -> None:
    """Each piece made an error that quoted all of it: 40 clients with 10 MB of headers held a router up for seconds."""

    async def never(request: web.BaseRequest) -> web.StreamResponse:
        raise AssertionError("this is no request")

    connection = ClientServer(never, idle_s=1, unread_s=1, refused=print)()
    connection.connection_made(Mock(asyncio.Transport, get_extra_info=Mock(return_value=None)))
    for _ in range(20):
        connection.data_received(b"x-padding: " + b"a" * 100_000 + b"\r\n")
    assert len(connection._messages) == 1
    connection.connection_lost(None)
    await asyncio.sleep(0)


async def test_a_broken_chunk_in_a_request_body_is_a_400() -> None:
    async with running_edge() as edge:
        reader, writer = await edge.connect()
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n")
        assert (await read_all(reader)).startswith((b"HTTP/1.1 400", b"HTTP/1.0 400"))


async def test_a_client_that_never_reads_is_cut_off_and_holds_the_engine_back_meanwhile() -> None:
    produced = 0
    chunk = event({"choices": [{"index": 0, "delta": {"content": "x" * 10_000}}]})

    class Counting(asyncio.Event):
        async def wait(self) -> Any:
            nonlocal produced
            produced += 1
            return True

    async with running_edge(write_timeout_s=0.3) as edge:
        edge.backend.script(Stream(*[piece for _ in range(20_000) for piece in (chunk, Counting())]))
        _, writer = await edge.connect()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        body = b'{"stream":true}'
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(5):
            await until(lambda: edge.dispatcher.dispatches)
            async with edge.post("/v1/completions", {"prompt": "other"}) as response:  # nobody else waits
                assert response.status == 200
            await edge.dispatcher.dispatches[0].ended.wait()
        await edge.backend.received[0].gone.wait()
        assert (
            produced * len(chunk) < 30_000_000
        )  # kernel and library buffers on two loopback connections; 200 MB were to come
        outcome = edge.dispatcher.dispatches[0].outcome
        assert outcome is not None
        assert outcome.aborted


async def test_a_client_that_never_reads_a_large_whole_answer_is_cut_off() -> None:
    async with running_edge(write_timeout_s=0.2) as edge:
        edge.backend.script(as_json({"data": "x" * 30_000_000}))
        _, writer = await edge.connect()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(HEAD + b"Content-Length: 2\r\n\r\n{}")
        await until(lambda: edge.dispatcher.dispatches)
        await until(lambda: not edge.edge.open_requests)
        assert edge.last.outcome is not None
        assert edge.last.outcome.status == 200


async def test_requests_beyond_the_limit_wait_in_line() -> None:
    gate = asyncio.Event()
    async with running_edge(max_inflight=2, max_queued=1, queue_timeout_s=5) as edge:
        token = event({"choices": [{"index": 0, "text": "t"}]})
        edge.backend.default = Stream(token, gate)
        asking = [
            asyncio.ensure_future(edge.post("/v1/completions", {"stream": True, "n": i}).__aenter__()) for i in range(3)
        ]
        await until(lambda: len(edge.backend.received) == 2 and edge.metric("waiting_requests") == 1)
        async with edge.post("/v1/completions", {}) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
            assert (await response.json())["error"]["type"] == "rate_limit_error"
        async with edge.client.get(edge.url + "/v1/models") as response:  # listing models takes no place
            assert response.status == 200
        gate.set()
        for each in asyncio.as_completed(asking):
            reply = await each
            assert (reply.status, await reply.read()) == (200, token)
        assert edge.metric("waiting_requests") == 0


async def test_waiting_for_a_place_has_a_deadline() -> None:
    async with running_edge(max_inflight=1, queue_timeout_s=0.03) as edge:
        edge.backend.script(Broken(Then.HANG))
        asking = asyncio.ensure_future(edge.post("/v1/completions", {}).__aenter__())
        await until(lambda: edge.backend.received)
        async with edge.post("/v1/completions", {}) as response:
            assert response.status == 429
            assert "in time" in (await response.json())["error"]["message"]
        asking.cancel()
        await edge.last.ended.wait()
        async with edge.post("/v1/completions", {}) as response:
            assert response.status == 200


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with running_edge() as edge:
        edge.backend.script(as_json({"n": 1}), as_json({"n": 2}))
        reader, writer = await edge.connect()
        writer.write((HEAD + b"Content-Length: 2\r\n\r\n{}") * 2)
        for n in (b'{"n":1}', b'{"n":2}'):
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(len(n)) == n


async def test_http_1_0_clients_get_a_stream_that_ends_with_the_connection() -> None:
    token = event({"choices": [{"index": 0, "delta": {"content": "t"}}]})
    async with running_edge() as edge:
        edge.backend.script(Stream(token, event(b"[DONE]")))
        reader, writer = await edge.connect()
        body = b'{"stream":true}'
        writer.write(b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        head, _, rest = (await read_all(reader)).partition(b"\r\n\r\n")
        assert b"chunked" not in head.lower()
        assert rest == token + event(b"[DONE]")


async def test_a_half_closed_connection_counts_as_gone() -> None:
    async with running_edge() as edge:
        edge.backend.script(Broken(Then.HANG))
        _, writer = await edge.connect()
        writer.write(HEAD + b"Content-Length: 2\r\n\r\n{}")
        await until(lambda: edge.backend.received)
        writer.write_eof()
        async with asyncio.timeout(1):
            await edge.backend.received[0].gone.wait()
