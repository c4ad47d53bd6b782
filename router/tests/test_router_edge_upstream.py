"""The router's own HTTP to engines: parsing, kept connections, holding an engine back."""

from __future__ import annotations

import asyncio
import itertools
import ssl
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixpool_router.engine_http import AnswerParser, EngineRequest
from prefixpool_router.failures import RefusedError, ResetError
from prefixpool_router.upstream import Upstream
from prefixpool_testing.backend import Backend, Broken, Raw, Stream, Then, as_json

CERTIFICATES = Path(__file__).parent / "certificates"
OK = b"HTTP/1.1 200 OK\r\n"
GET = EngineRequest("GET", "/v1/models", (), b"", 0)


def parsed(raw: bytes, *, method: str = "POST", cuts: tuple[int, ...] = ()) -> tuple[AnswerParser, list[bytes]]:
    parser = AnswerParser(method)
    places = sorted({0, *(cut % (len(raw) + 1) for cut in cuts), len(raw)})
    chunks = [chunk for a, b in itertools.pairwise(places) for chunk in parser.feed(raw[a:b])]
    return parser, chunks


@given(
    bodies=st.lists(st.binary(min_size=1, max_size=300) | st.just(b"x" * 70_000), max_size=6),
    cuts=st.lists(st.integers(0, 1 << 20), max_size=15),
    extension=st.sampled_from([b"", b";a=b", b" ; q"]),
    trailers=st.sampled_from([b"", b"X: 1\r\nY: 2\r\n"]),
    interim=st.sampled_from([b"", b"HTTP/1.1 100 Continue\r\n\r\n"]),
)
def test_chunks_keep_their_boundaries_however_the_bytes_arrive(
    bodies: list[bytes], cuts: list[int], extension: bytes, trailers: bytes, interim: bytes
) -> None:
    framed = b"".join(b"%X%b\r\n%b\r\n" % (len(body), extension, body) for body in bodies)
    raw = interim + OK + b"Transfer-Encoding: chunked\r\nA: b\r\n\r\n" + framed + b"0\r\n" + trailers + b"\r\n"
    parser, chunks = parsed(raw, cuts=tuple(cuts))
    assert (parser.complete, parser.reusable) == (True, True)
    assert parser.head is not None
    assert (parser.head.status, parser.head.reason, parser.head.headers["a"]) == (200, "OK", "b")
    assert b"".join(chunks) == b"".join(bodies)
    short = [body for body in bodies if len(body) < 70_000]
    assert [chunk for chunk in chunks if chunk in short] == short  # only long chunks come in pieces


@given(body=st.binary(max_size=500), cuts=st.lists(st.integers(0, 1 << 20), max_size=8))
def test_bodies_with_a_length(body: bytes, cuts: list[int]) -> None:
    parser, chunks = parsed(OK + b"content-length: %d\r\n\r\n" % len(body) + body, cuts=tuple(cuts))
    assert (b"".join(chunks), parser.complete, parser.reusable) == (body, True, True)


@pytest.mark.parametrize(
    ("head", "reusable"),
    [
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", False),
        (OK + b"Connection: Close\r\nContent-Length: 0\r\n\r\n", False),
    ],
)
def test_connections_that_end_with_their_answer(head: bytes, reusable: bool) -> None:
    assert parsed(head)[0].reusable is reusable


def test_a_body_until_the_end_of_the_connection() -> None:
    parser, chunks = parsed(OK + b"\r\nabc")
    assert (chunks, parser.complete) == ([b"abc"], False)
    parser.end()
    assert (parser.complete, parser.reusable) == (True, False)


@pytest.mark.parametrize(
    ("method", "raw"),
    [
        ("HEAD", OK + b"Content-Length: 27\r\n\r\n"),
        ("POST", b"HTTP/1.1 204 No Content\r\n\r\n"),
        ("GET", b"HTTP/1.1 304 Not Modified\r\nTransfer-Encoding: chunked\r\n\r\n"),
        ("POST", b"HTTP/1.1 200 \r\nContent-Length: 0\r\n\r\n"),
    ],
)
def test_answers_without_a_body(method: str, raw: bytes) -> None:
    parser, chunks = parsed(raw, method=method)
    assert (chunks, parser.complete) == ([], True)


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        OK + b"no colon\r\n\r\n",
        OK + b"space : before\r\n\r\n",
        OK + b" folded: x\r\n\r\n",
        OK + b"Content-Length: -1\r\n\r\n",
        OK + b"Content-Length: +1\r\n\r\n",
        OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        OK + b"Content-Length: 1\r\n\r\nab",
        OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n11171\r\n" + b"x" * 70_001 + b"yz0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"1" * 2000,
        OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nmore",
        OK + b"A: " + b"x" * 70_000,
    ],
)
def test_what_is_not_plainly_http_is_an_error(raw: bytes) -> None:
    with pytest.raises(ResetError):
        parsed(raw)


@pytest.mark.parametrize(
    "raw", [b"", OK, OK + b"Content-Length: 2\r\n\r\na", OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n"]
)
def test_an_answer_cut_short_is_an_error(raw: bytes) -> None:
    parser, _ = parsed(raw)
    with pytest.raises(ResetError):
        parser.end()


def test_request_heads() -> None:
    request = EngineRequest("POST", "/v1/x?a=b", ((b"X-Odd", b"\xff"),), b"", 0)
    assert (
        request.head("h:1", "/base")
        == b"POST /base/v1/x?a=b HTTP/1.1\r\nHost: h:1\r\nX-Odd: \xff\r\nContent-Length: 0\r\n\r\n"
    )
    assert GET.head("h", "") == b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n"
    assert b"Transfer-Encoding: chunked" in request._replace(length=None).head("h", "")


async def test_a_kept_connection_that_closes_in_the_moment_of_its_use_is_replaced() -> None:
    async with Backend() as backend:
        upstream = Upstream(connect_s=1)
        backend.script(as_json({"n": 1}), Broken(Then.CLOSE), as_json({"n": 2}))
        for expected in (b'{"n":1}', b'{"n":2}'):
            answer = await upstream.send(backend.url, GET)
            assert await answer.next() == expected
        assert len(backend.received) == 3
        await upstream.close()


async def test_an_engine_that_dies_of_a_request_on_a_kept_connection_is_not_taken_for_absent() -> None:
    async with Backend() as backend:
        upstream = Upstream(connect_s=1)
        answer = await upstream.send(backend.url, GET)
        await answer.next()
        backend.script(Broken(Then.HANG))
        asking = asyncio.ensure_future(upstream.send(backend.url, GET))
        while len(backend.received) < 2:  # noqa: ASYNC110 -- nobody announces it
            await asyncio.sleep(0.002)
        await backend.close()
        with pytest.raises(ResetError):
            await asking
        with pytest.raises(RefusedError):
            await upstream.send(backend.url, GET)
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
        while chunk := await answer.next():
            size += len(chunk)
        assert size == 100_000_000
        await upstream.close()


async def test_what_came_before_a_break_is_delivered() -> None:
    async with Backend() as backend:
        backend.script(Raw(OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n1\r\nb\r\n", then=Then.CLOSE))
        upstream = Upstream(connect_s=1)
        answer = await upstream.send(backend.url, GET)
        await asyncio.sleep(0.03)
        assert [await answer.next(), await answer.next()] == [b"a", b"b"]
        with pytest.raises(ResetError):
            await answer.next()
        await upstream.close()


@pytest.mark.parametrize("url", ["ftp://x", "http://", "nonsense"])
async def test_an_engine_without_a_usable_address_counts_as_refused(url: str) -> None:
    upstream = Upstream(connect_s=1)
    with pytest.raises(RefusedError):
        await upstream.send(url, GET)
    await upstream.close()


async def test_a_certificate_that_is_not_trusted_is_no_connection() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATES / "first.cert.pem", CERTIFICATES / "first.key.pem")
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    upstream = Upstream(connect_s=1)
    with pytest.raises(RefusedError):
        await upstream.send(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}", GET)
    server.close()
    await upstream.close()
