"""Request bodies share one budget of memory. Without it, clients that never finish theirs could take all there is."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AbstractAsyncContextManager

import pytest

from prefixpool_router.settings import RouterSettings
from prefixpool_testing.backend import Broken, Then
from prefixpool_testing.edge import EdgeUnderTest, running_edge, until

PART = 30_000  # what an unfinished body sends; three fit


def small_edge(body_timeout_s: float = 60.0) -> AbstractAsyncContextManager[EdgeUnderTest]:
    return running_edge(max_body_bytes=60_000, max_buffered_bytes=100_000, body_timeout_s=body_timeout_s)


async def unfinished(
    edge: EdgeUnderTest, path: str = "/v1/completions"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends a part of its body and no more."""
    reader, writer = await edge.connect()
    writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {2 * PART}\r\n\r\n".encode() + b" " * PART)
    return reader, writer


async def full(edge: EdgeUnderTest) -> list[asyncio.StreamWriter]:
    """Three unfinished bodies are held; a fourth does not fit."""
    writers = [(await unfinished(edge))[1] for _ in range(3)]
    await until(lambda: edge.metric("body_bytes") == 3 * PART)
    return writers


async def test_many_unfinished_bodies_held_no_more_than_the_budget_and_others_were_served() -> None:
    async with small_edge() as edge:
        await full(edge)
        for _ in range(20):
            reader, _ = await unfinished(edge)
            assert (await reader.readline()).startswith(b"HTTP/1.1 429")
            assert edge.metric("body_bytes") == 3 * PART
        async with edge.post("/v1/completions", {"prompt": "short"}) as response:
            assert response.status == 200
        assert edge.edge.open_requests == 3


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/completions", b'{"error":{"message":"The router'),
        ("/v1/messages", b'{"type":"error","error":{"type":"rate_limit'),
    ],
)
async def test_a_body_beyond_the_budget_is_told_to_come_back_and_its_connection_closed(path: str, told: bytes) -> None:
    async with small_edge() as edge:
        await full(edge)
        reader, writer = await unfinished(edge, path)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 429")
        assert b"Retry-After: 1\r\n" in head
        assert b"connection: close" in head.lower()
        assert (await reader.readexactly(len(told))) == told
        writer.write(b" " * PART)  # what is still sent is dropped, and then the connection ends
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(3):
                await reader.read()
        assert edge.metric("body_bytes") == 3 * PART


async def test_a_body_counts_until_its_request_has_ended() -> None:
    async with small_edge() as edge:
        edge.backend.script(Broken(Then.HANG))
        body = b'{"prompt":"' + b"x" * 50_000 + b'"}'
        asking = asyncio.ensure_future(edge.post("/v1/completions", body).__aenter__())
        await until(lambda: edge.backend.received)
        assert edge.metric("body_bytes") == len(body)
        asking.cancel()
        await until(lambda: not edge.edge.open_requests)
        assert edge.metric("body_bytes") == 0
        async with edge.post("/v1/completions", body) as response:
            assert response.status == 200
        await until(lambda: edge.metric("body_bytes") == 0)


async def test_clients_that_went_away_in_the_middle_of_a_body_hold_nothing() -> None:
    async with small_edge() as edge:
        for writer in await full(edge):
            writer.transport.abort()
        await until(lambda: edge.metric("body_bytes") == 0)


async def test_bodies_that_did_not_arrive_in_time_hold_nothing() -> None:
    async with small_edge(body_timeout_s=0.1) as edge:
        for _ in range(3):
            await unfinished(edge)
        await until(lambda: edge.metric("rejected_requests_total", status="408") == 3)
        assert edge.metric("body_bytes") == 0


async def test_a_declared_length_takes_nothing_of_the_budget() -> None:
    async with small_edge() as edge:
        for _ in range(3):
            _, writer = await edge.connect()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n")
        await until(lambda: edge.edge.open_requests == 3)
        assert edge.metric("body_bytes") == 0


async def test_the_longest_body_fits_though_the_budget_is_set_below_it() -> None:
    async with running_edge(max_body_bytes=300_000, max_buffered_bytes=1024) as edge:
        body = b'{"prompt":"' + b"x" * (300_000 - 13) + b'"}'
        async with edge.post("/v1/completions", body) as response:
            assert response.status == 200


def test_the_default_budget_is_512_mib() -> None:
    assert RouterSettings().max_buffered_bytes == 536_870_912
