"""`/health` on the port for clients: what a load balancer sees. No key, no body, no replica asked."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from prefixpool_testing.backend import Stream, event
from prefixpool_testing.edge import EdgeUnderTest, running_edge

TOKEN = event({"choices": [{"index": 0, "text": "t"}]})


async def health(edge: EdgeUnderTest, method: str = "GET", path: str = "/health") -> tuple[int, bytes]:
    async with edge.client.request(method, edge.url + path) as response:
        assert response.headers.getall("Server") == ["prefixpool"]
        return response.status, await response.read()


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", ["/health", "/health?from=probe"])
async def test_it_follows_readiness(method: str, path: str) -> None:
    async with running_edge() as edge:
        assert await health(edge, method, path) == (200, b"")
        edge.dispatcher.ready = False
        assert await health(edge, method, path) == (503, b"")
        assert not edge.dispatcher.dispatches
        assert not edge.backend.received


async def test_it_needs_no_key_where_all_else_does(tmp_path: Path) -> None:
    keys, salt = tmp_path / "keys", tmp_path / "salt"
    keys.write_text(f"{hashlib.sha256(b'k').hexdigest()} red\n")
    salt.write_bytes(b"s" * 16)
    async with running_edge(keys_file=str(keys), salt_key_file=str(salt)) as edge:
        assert await health(edge) == (200, b"")
        assert (await health(edge, path="/v1/models"))[0] == 401


@pytest.mark.parametrize("path", ["/health/", "/healthz", "/%68ealth", "//health", "/v1/../health"])
async def test_other_spellings_do_not_exist(path: str) -> None:
    async with running_edge() as edge:
        reader, writer = await edge.connect()
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        async with asyncio.timeout(3):
            assert (await reader.readline()).startswith(b"HTTP/1.1 404")


async def test_other_methods_are_told_which_there_are() -> None:
    async with running_edge() as edge:
        assert (await health(edge, "POST"))[0] == 405
        async with edge.client.options(edge.url + "/health") as response:
            assert (response.status, response.headers["Allow"]) == (204, "GET, HEAD, OPTIONS")


async def test_it_answers_while_the_router_is_at_its_limit() -> None:
    gate = asyncio.Event()
    async with running_edge(max_inflight=1, max_queued=0) as edge:
        edge.backend.script(Stream(TOKEN, gate))
        async with edge.post("/v1/completions", {"stream": True}) as running:
            await running.content.readchunk()
            assert await health(edge) == (200, b"")
            gate.set()
            await running.read()


async def test_a_draining_router_asks_even_the_prober_to_connect_anew() -> None:
    async with running_edge() as edge:
        edge.edge.begin_drain()
        async with edge.client.get(edge.url + "/health") as response:
            assert response.headers["Connection"] == "close"


async def test_probes_are_not_requests_of_clients() -> None:
    """Alerts look at the share of answers that failed."""
    async with running_edge() as edge:
        edge.dispatcher.ready = False
        await health(edge)
        assert edge.metric("requests_total", api="health", status="503") is None
