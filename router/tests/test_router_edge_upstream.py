"""HTTP to engines: what counts as an answer, kept connections, holding an engine back."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import Mock

import aiohttp
import pytest
from aiohttp.base_protocol import BaseProtocol
from multidict import CIMultiDict

from prefixpool_router.engine_answer import EngineAnswer
from prefixpool_router.engine_call import EngineRequest
from prefixpool_router.failures import RefusedError, ResetError
from prefixpool_router.upstream import Upstream
from prefixpool_testing.backend import Backend, Broken, Raw, Stream, Then, as_json

CERTIFICATES = Path(__file__).parent / "certificates"
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
GET = EngineRequest("GET", "/v1/models", CIMultiDict(), b"")
POST = EngineRequest("POST", "/v1/completions", CIMultiDict({"X-Kept": "1"}), b'{"prompt":"x"}')


async def read(answer: EngineAnswer) -> list[bytes]:
    read = []
    while chunks := await answer.chunks():
        read += chunks
    return read


@asynccontextmanager
async def upstream_to_one() -> AsyncIterator[tuple[Upstream, Backend]]:
    async with Backend() as backend:
        upstream = Upstream(connect_s=1)
        try:
            yield upstream, backend
        finally:
            await upstream.close()


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n",
        OK + b"no colon\r\n\r\n",
        OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: gzip\r\n\r\n",
        OK + b"Content-Length: -1\r\n\r\n",
        OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        OK + b"A: " + b"x" * 70_000,
        OK + CHUNKED + b"zz\r\n",
        OK + CHUNKED + b"-1\r\n",
        OK + CHUNKED + b"1\r\nabc\r\n",
        OK + CHUNKED + b"1\r\na\r\nzz\r\n",
    ],
)
async def test_what_is_not_plainly_http_is_an_error(raw: bytes) -> None:
    async with upstream_to_one() as (upstream, backend):
        backend.script(Raw(raw))
        async with asyncio.timeout(5):
            with pytest.raises(ResetError):
                await read(await upstream.send(backend.url, POST))


@pytest.mark.parametrize("raw", [b"", OK, OK + b"Content-Length: 2\r\n\r\na", OK + CHUNKED + b"1\r\na\r\n"])
async def test_an_answer_cut_short_is_an_error(raw: bytes) -> None:
    async with upstream_to_one() as (upstream, backend):
        backend.script(Raw(raw, then=Then.CLOSE))
        with pytest.raises(ResetError):
            await read(await upstream.send(backend.url, POST))


async def test_a_body_until_the_end_of_the_connection() -> None:
    async with upstream_to_one() as (upstream, backend):
        backend.script(Raw(OK + b"\r\nabc", then=Then.CLOSE))
        assert await read(await upstream.send(backend.url, GET)) == [b"abc"]


async def test_answers_without_a_body_end_however_many_there_are() -> None:
    async with upstream_to_one() as (upstream, backend):
        for _ in range(3):
            answer = await upstream.send(backend.url, GET._replace(method="HEAD"))
            assert (answer.status, await read(answer)) == (200, [])
        assert backend.connections == 1


async def test_only_long_chunks_come_in_pieces() -> None:
    pieces = [b"a", b"x" * 200_000, b"b" * 60_000, b"c"]
    async with upstream_to_one() as (upstream, backend):
        backend.script(Stream(*pieces))
        chunks = await read(await upstream.send(backend.url, GET))
        assert b"".join(chunks) == b"".join(pieces)
        assert [chunk for chunk in chunks if chunk in pieces] == [b"a", b"b" * 60_000, b"c"]


@pytest.mark.parametrize("size", [0, 1, 100_000, 3_000_000])
async def test_bodies_of_any_size_are_sent_with_their_length(size: int) -> None:
    async with upstream_to_one() as (upstream, backend):
        await read(await upstream.send(backend.url, POST._replace(body=b"x" * size)))
        received = backend.received[0]
        assert (received.body, received.headers["Content-Length"]) == (b"x" * size, str(size))
        assert sorted(received.headers) == ["Content-Length", "Host", "X-Kept"]  # nothing of the library's own


@pytest.mark.parametrize("then", [Then.CLOSE, Then.RESET])
async def test_a_kept_connection_that_closes_in_the_moment_of_its_use_is_replaced(then: Then) -> None:
    async with upstream_to_one() as (upstream, backend):
        backend.script(as_json({"n": 1}), Broken(then), as_json({"n": 2}))
        for expected in (b'{"n":1}', b'{"n":2}'):
            assert await read(await upstream.send(backend.url, POST)) == [expected]
        assert [received.body for received in backend.received] == [POST.body] * 3


async def test_a_new_connection_that_breaks_is_not_replaced() -> None:
    async with upstream_to_one() as (upstream, backend):
        backend.script(Broken(Then.CLOSE))
        with pytest.raises(ResetError):
            await upstream.send(backend.url, POST)
        assert len(backend.received) == 1


async def test_two_kept_connections_that_were_closed_are_replaced_by_one() -> None:
    async with upstream_to_one() as (upstream, backend):
        gate = asyncio.Event()
        backend.script(Stream(gate, b"a"), Stream(gate, b"b"), Broken(Then.CLOSE))
        answers = [await upstream.send(backend.url, POST) for _ in range(2)]
        gate.set()
        assert [await read(answer) for answer in answers] == [[b"a"], [b"b"]]
        assert await read(await upstream.send(backend.url, POST)) == [b'{"ok":true}']
        assert len(backend.received) == 4


async def test_what_an_engine_says_unasked_is_not_the_answer_to_the_next_request() -> None:
    gate = asyncio.Event()
    async with upstream_to_one() as (upstream, backend):
        backend.script(Raw(OK + b"Content-Length: 1\r\n\r\n1", gate, OK + b"Content-Length: 5\r\n\r\nstale"))
        assert await read(await upstream.send(backend.url, POST)) == [b"1"]
        gate.set()
        await asyncio.sleep(0.02)
        assert await read(await upstream.send(backend.url, POST)) == [b'{"ok":true}']
        assert backend.connections == 1


async def endless() -> AsyncIterator[bytes]:
    while True:
        yield b"x" * 100_000


@pytest.mark.parametrize("arriving", [False, True])
async def test_an_answer_before_the_end_of_its_request_ends_the_connection(*, arriving: bool) -> None:
    body = endless() if arriving else b"x" * 20_000_000
    async with upstream_to_one() as (upstream, backend):
        backend.script(Raw(OK + b"Content-Length: 3\r\n\r\n413", read_body=False))
        assert await read(await upstream.send(backend.url, POST._replace(body=body))) == [b"413"]
        assert await read(await upstream.send(backend.url, POST)) == [b'{"ok":true}']


async def test_an_engine_that_dies_of_a_request_on_a_kept_connection_is_not_taken_for_absent() -> None:
    async with Backend() as backend:
        upstream = Upstream(connect_s=1)
        answer = await upstream.send(backend.url, POST)
        await answer.chunks()
        backend.script(Broken(Then.HANG))
        asking = asyncio.ensure_future(upstream.send(backend.url, POST))
        while len(backend.received) < 2:  # noqa: ASYNC110 -- nobody announces it
            await asyncio.sleep(0.002)
        await backend.close()
        with pytest.raises(ResetError):
            await asking
        with pytest.raises(RefusedError):
            await upstream.send(backend.url, POST)
        await upstream.close()


async def test_an_engine_whose_answer_nobody_takes_is_held_back() -> None:
    produced = 0

    class Counting(asyncio.Event):
        async def wait(self) -> bool:  # type: ignore[override]
            nonlocal produced
            produced += 1
            return True

    async with Backend() as backend:
        backend.script(Stream(*[piece for _ in range(2000) for piece in (b"x" * 50_000, Counting())]))
        upstream = Upstream(connect_s=1)
        answer = await upstream.send(backend.url, GET)
        before = -1
        while before != produced:
            before = produced
            await asyncio.sleep(0.05)
        assert produced * 50_000 < 20_000_000  # the kernel's buffers and ours, of 100 MB
        size = 0
        while chunks := await answer.chunks():
            size += sum(map(len, chunks))
        assert size == 100_000_000
        await upstream.close()


async def test_what_came_before_a_break_is_delivered() -> None:
    async with Backend() as backend:
        backend.script(Raw(OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n1\r\nb\r\n", then=Then.CLOSE))
        upstream = Upstream(connect_s=1)
        answer = await upstream.send(backend.url, GET)
        await asyncio.sleep(0.03)
        assert await answer.chunks() == [b"a", b"b"]
        with pytest.raises(ResetError):
            await answer.chunks()
        await upstream.close()


def arriving_in_chunks() -> tuple[EngineAnswer, aiohttp.StreamReader]:
    """An answer of which a test says what has arrived."""
    content = aiohttp.StreamReader(Mock(BaseProtocol), 1 << 16, loop=asyncio.get_running_loop())
    return EngineAnswer(Mock(), Mock(chunked=True), content), content


async def test_the_last_chunk_whose_end_comes_with_the_end_of_the_answer_is_not_lost() -> None:
    answer, content = arriving_in_chunks()
    for data in (b"a", b"b"):
        content.begin_http_chunk_receiving()
        content.feed_data(data)
        if data == b"a":
            content.end_http_chunk_receiving()
    assert await answer.chunks() == [b"a"]
    content.end_http_chunk_receiving()  # while the client takes the first: "\r\n0\r\n\r\n"
    content.feed_eof()
    assert not answer.ended
    assert await answer.chunks() == [b"b"]
    assert answer.ended


async def test_a_burst_is_not_one_write_with_one_deadline_for_a_slow_client() -> None:
    answer, content = arriving_in_chunks()
    for _ in range(40):
        content.begin_http_chunk_receiving()
        content.feed_data(b"x" * 10_000)
        content.end_http_chunk_receiving()
    content.feed_eof()
    sizes = []
    while chunks := await answer.chunks():
        sizes.append(sum(map(len, chunks)))
    assert sum(sizes) == 400_000
    assert max(sizes) < 80_000


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port", "nonsense"])
async def test_an_engine_without_a_usable_address_counts_as_refused(url: str) -> None:
    upstream = Upstream(connect_s=1)
    with pytest.raises(RefusedError):
        await upstream.send(url, GET)
    await upstream.close()


async def test_credentials_in_an_engines_address_are_not_sent() -> None:
    async with upstream_to_one() as (upstream, backend):
        request = POST._replace(headers=CIMultiDict({"Authorization": "Bearer engine-key"}), target="/v1/x%2Fy?q=a%20b")
        await read(await upstream.send(backend.url.replace("//", "//name:word@"), request))
        assert backend.received[0].headers.getall("Authorization") == ["Bearer engine-key"]
        assert backend.received[0].path == request.target


async def test_a_certificate_that_is_not_trusted_is_no_connection() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATES / "first.cert.pem", CERTIFICATES / "first.key.pem")
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    upstream = Upstream(connect_s=1)
    with pytest.raises(RefusedError):
        await upstream.send(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}", GET)
    server.close()
    await upstream.close()
