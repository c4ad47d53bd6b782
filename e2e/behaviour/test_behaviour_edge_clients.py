"""Clients with bad input or bad manners at a real pool: a clear refusal or a closed connection, and nobody else harmed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prefixpool_testing.eventually import eventually
from prefixpool_testing.pool_client import CHAT, MESSAGES, chat
from prefixpool_testing.rude_client import RudeClient, rude_client
from prefixpool_testing.sim_pool import KEYS, PoolOptions, SimPool, text
from prefixpool_testing.traffic import clients_of, traffic

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_BODY = 1_000_000
POOL = PoolOptions(
    replicas=2,
    device_blocks=3000,
    router_args=(
        *(f"--max-body-bytes={MAX_BODY}", "--idle-timeout-s=3", "--body-timeout-s=2", "--write-timeout-s=2"),
        "--explain-last=20000",  # traffic must not push out the decisions that a test waits for
    ),
)
CROWD = 10  # of each kind
GROWTH_BYTES = 96 << 20  # of the router's memory: the crowd sends and asks for far more
HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEYS['alpha']}\r\n".encode()
GOOD = chat("one message")
DEEP = b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def body(**fields: Any) -> bytes:
    return msgspec.json.encode({"model": "sim", **GOOD, **fields})


REFUSED_BY_THE_ROUTER = {
    "not JSON": (b'{"model": "sim", ', 400),
    "not an object": (b'["model", "sim"]', 400),
    "nothing": (b"", 400),
    "too large": (body(pad="x" * MAX_BODY), 413),
    "unknown model": (body(model="gpt-17"), 404),
    "invalid UTF-8": (body(pad="x").replace(b"x", b"\xff"), 400),
    "half a surrogate pair": (body().replace(b"one message", rb"one \ud800 message"), 400),
    "deep nesting": (DEEP, 400),
    "deep nesting beside good fields": (body()[:-1] + b"," + DEEP[1:], 400),
}
REFUSED_BY_THE_ENGINE = {
    "longer than the context": (body(messages=[{"role": "user", "content": "word " * 20_000}]), 400),
    "wrong type": (body(messages=7), 400),
    "no messages": (b'{"model": "sim"}', 400),
}


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("what", REFUSED_BY_THE_ROUTER)
async def test_bad_input_is_a_client_error_in_the_clients_dialect(pool: SimPool, path: str, what: str) -> None:
    raw, status = REFUSED_BY_THE_ROUTER[what]
    reply = await pool.client.post(path, raw)
    assert reply.status == status, reply.body[:300]
    answer = reply.json()
    assert answer["error"]["message"]
    assert answer["error"]["type"]
    assert (answer.get("type") == "error") == (path == MESSAGES)
    assert ("code" in answer["error"]) == (path == CHAT)
    assert (await pool.client.chat("after bad input")).status == 200


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("what", REFUSED_BY_THE_ENGINE)
async def test_engines_refusals_are_neither_changed_nor_retried_nor_held_against_them__peers_42(
    pool: SimPool, path: str, what: str
) -> None:
    raw, status = REFUSED_BY_THE_ENGINE[what]
    retries = await pool.metric("prefixpool_router_retries_total")
    direct = await pool.engine(pool.names[0]).post(path, raw)
    for _ in range(4):
        reply = await pool.client.post(path, raw)
        assert (reply.status, reply.body) == (direct.status, direct.body) == (status, direct.body)
    assert await pool.metric("prefixpool_router_retries_total") == retries
    await pool.usable()


async def test_tools_without_parameters_and_unknown_fields_reach_the_engine__peers_43(pool: SimPool) -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    strange = {"tools": tools, "field_of_next_year": {"a": [1.0, None, 10**19]}}
    assert (await pool.client.chat(text("strange fields"), **strange)).status == 200


# -- bad manners


async def huge_headers(client: RudeClient) -> bytes:
    await client.send(HEAD, *[b"x-padding: " + b"a" * 100_000 + b"\r\n"] * 100, b"\r\n")
    return await client.answer()


async def many_headers(client: RudeClient) -> bytes:
    await client.send(HEAD, *[b"".join(b"x-%d: a\r\n" % (i * 1000 + j) for j in range(1000)) for i in range(100)], b"\r\n")
    return await client.answer()


async def slow_head(client: RudeClient) -> bytes:
    await client.trickle(HEAD + b"content-length: 2\r\n\r\n{}", every_s=0.1)
    return await client.answer()


async def slow_body(client: RudeClient) -> bytes:
    await client.send(HEAD + b"content-length: 1000\r\n\r\n")
    await client.trickle(b" " * 1000, every_s=0.1)
    return await client.answer()


async def endless_body(client: RudeClient) -> bytes:
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    await client.send(HEAD + b"transfer-encoding: chunked\r\n\r\n", *[chunk] * 200)
    return await client.answer()


async def large_body_declared(client: RudeClient) -> bytes:
    await client.send(HEAD + b"content-length: 10000000000\r\n\r\n", b"{" * 1000)
    return await client.answer()


async def deep_body(client: RudeClient) -> bytes:
    raw = b"[" * 500_000 + b"]" * 500_000
    await client.send(HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw)
    return await client.answer()


async def no_http(client: RudeClient) -> bytes:
    await client.send(b"\x16\x03\x01" + b"\x00" * 500 + b"\r\n\r\n")
    return await client.answer()


async def no_request(client: RudeClient) -> bytes:
    return await client.answer()


Manners = Callable[[RudeClient], Coroutine[Any, Any, bytes]]
REFUSALS: dict[Manners, set[bytes]] = {
    huge_headers: {b"431", b""},
    many_headers: {b"431", b"400", b""},
    slow_head: {b"408", b""},
    slow_body: {b"408"},
    endless_body: {b"413", b"408", b""},  # on a busy machine the time for a body is over before its limit is reached
    large_body_declared: {b"413"},
    deep_body: {b"400"},
    no_http: {b"400", b""},
    no_request: {b""},
}


async def memory(pool: SimPool) -> int:
    """Resident bytes of the router process."""
    (report,) = await pool.routers()
    return int(Path(f"/proc/{report.pid}/statm").read_text().split()[1]) * 4096


async def test_crowd_with_bad_manners_is_turned_away_and_harms_nobody(pool: SimPool) -> None:
    async def one(manners: Manners) -> tuple[str, bytes]:
        async with rude_client(pool.client.url) as client:
            answer = await manners(client)
        return manners.__name__, answer[9:12]

    async with traffic(clients_of(pool), name="beside a crowd") as seen:
        await seen.more(20)
        before = peak = await memory(pool)
        crowd = asyncio.gather(*(one(manners) for manners in REFUSALS for _ in range(CROWD)))
        while not crowd.done():
            peak = max(peak, await memory(pool))
            await asyncio.sleep(0.05)
        await seen.more(20)
    allowed = {manners.__name__: statuses for manners, statuses in REFUSALS.items()}
    assert [(name, status) for name, status in await crowd if status not in allowed[name]] == []
    assert not seen.failures
    assert peak - before < GROWTH_BYTES


async def test_clients_that_never_read_are_cut_off(pool: SimPool) -> None:
    raw = body(stream=True, max_tokens=3000, min_tokens=3000, logprobs=True, top_logprobs=20)  # some megabytes of answer
    named = ["reads-nothing-0", "reads-nothing-1"]

    async def over() -> bool:
        return all([(await pool.explain(request_id)).outcome for request_id in named])

    before = await memory(pool)
    async with traffic(clients_of(pool), name="beside those who do not read") as seen, AsyncExitStack() as stack:
        for request_id in named:
            client = await stack.enter_async_context(rude_client(pool.client.url))
            client.read_nothing()
            head = HEAD + f"x-request-id: {request_id}\r\ncontent-length: {len(raw)}\r\n\r\n".encode()
            await client.send(head + raw)
        await seen.more(20)
        await eventually(over, what="answers that nobody reads are given up")
        assert await memory(pool) - before < GROWTH_BYTES
        for request_id in named:
            outcome = (await pool.explain(request_id)).outcome
            assert outcome is not None
            assert outcome.aborted
    assert not seen.failures
    await pool.settled()
