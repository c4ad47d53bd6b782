"""What clients may see of one another, and are told of the cache; what one engine alone would have answered."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from yarl import URL

from prefixpool_agent.gate.paths import classify
from prefixpool_testing.pool_client import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Body, chat
from prefixpool_testing.sim_pool import KEYS, PoolOptions, SimPool, salt_of, text

pytestmark = pytest.mark.asyncio(loop_scope="module")

POOL = PoolOptions(routers=2)
BLOCK = 32
APIS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)


def body_of(path: str, said: str, **more: Any) -> Body:
    """The same greedy request in each API's words."""
    if path == COMPLETIONS:
        return {"prompt": said, "max_tokens": 4, "temperature": 0, **more}
    if path == RESPONSES:
        return {"input": said, "max_output_tokens": 4, "temperature": 0, "store": False, **more}
    return chat(said, **more)


# -- tenants


@pytest.mark.parametrize("path", APIS)
async def test_tenants_do_not_find_each_others_prompts__peers_81(pool: SimPool, path: str) -> None:
    body = body_of(path, text(f"{path} of two tenants"))
    first = await pool.elsewhere.post(path, body)
    await pool.settled()
    other = await pool.other.post(path, body)
    await pool.settled()
    again = await pool.client.post(path, body)
    assert [reply.status for reply in (first, other, again)] == [200, 200, 200]
    assert first.cached == other.cached == other.predicted == 0
    assert again.cached == (again.prompt - 1) // BLOCK * BLOCK > 0
    assert abs(again.predicted - again.cached) <= BLOCK
    assert other.text == first.text, "a salt changes what is shared, not what is answered"


@pytest.mark.parametrize("path", APIS)
async def test_salt_of_another_tenant_is_no_way_in__peers_81(pool: SimPool, path: str) -> None:
    body = body_of(path, text(f"{path} with a forged salt"))
    await pool.elsewhere.post(path, body)
    await pool.settled()
    forged = await pool.other.post(path, {**body, "cache_salt": salt_of("alpha")})
    assert (forged.status, forged.cached, forged.predicted) == (200, 0, 0)


async def test_internal_fields_of_clients_do_not_reach_the_engine__peers_81(pool: SimPool) -> None:
    said = text("with internal fields")
    await pool.elsewhere.chat(said)
    await pool.settled()
    inner = {"cache_salt": "mine", "session_id": "mine", "skip_reading_prefix_cache": True, "priority": -5}
    again = await pool.client.chat(said, **inner, kv_transfer_params={"x": 1}, vllm_xargs={"x": "1"})
    assert again.cached == (again.prompt - 1) // BLOCK * BLOCK > 0
    assert abs(again.predicted - again.cached) <= BLOCK


# -- usage


async def test_messages_usage_adds_up_and_excludes_what_was_cached__peers_82(pool: SimPool) -> None:
    said = text("anthropic usage")
    body = chat(said)
    counted = (await pool.client.post("/v1/messages/count_tokens", {"messages": body["messages"]})).json()["input_tokens"]
    for turn in range(2):
        usage = (await pool.client.post(MESSAGES, body)).json()["usage"]
        created, read = usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"]
        assert usage["input_tokens"] + read + created == counted
        assert (read > 0) == (turn == 1)
        assert usage["input_tokens"] < counted
        await pool.settled()
    async with pool.client.stream(MESSAGES, body) as stream:
        await stream.rest()
    assert stream.done
    (final,) = [event["usage"] for event in stream.events if event["type"] == "message_delta"]
    read = final["cache_read_input_tokens"]
    assert read == (counted - 1) // BLOCK * BLOCK
    assert final["input_tokens"] + read + final["cache_creation_input_tokens"] == counted


async def test_usage_of_a_stream_is_true_and_seen_by_those_who_asked_only__peers_82(pool: SimPool) -> None:
    said = text("usage in a stream")
    whole = await pool.client.chat(said)
    await pool.settled()
    async with pool.client.stream(CHAT, chat(said, stream_options={"include_usage": True})) as stream:
        await stream.rest()
    (usage,) = [event["usage"] for event in stream.events if event.get("usage")]
    cached = (whole.prompt - 1) // BLOCK * BLOCK
    assert usage["prompt_tokens"] == whole.prompt
    assert usage["prompt_tokens_details"]["cached_tokens"] == cached
    async with pool.client.stream(CHAT, chat(said)) as quiet:
        await quiet.rest()
    assert quiet.done
    assert not [event for event in quiet.events if event.get("usage") or not event["choices"]]
    told = await pool.explain(quiet.headers["x-request-id"])
    assert told.outcome is not None
    assert (told.outcome.prompt_tokens, told.outcome.cached_tokens) == (whole.prompt, cached)


# -- engines

PATHS = (
    *(CHAT, COMPLETIONS, RESPONSES, MESSAGES, "/v1/responses/resp_1", "/v1/responses/resp_1/cancel", "/v1/embeddings"),
    *("/v1/messages/count_tokens", "/v1/models", "/v1/models/sim", "/v1/audio/transcriptions", "/v1/chat/completions/batch"),
    *("/v1/chat/completions/render", "/v1/completions/render", "/v1/score", "/v1/rerank", "/v2/rerank", "/rerank", "/score"),
    *("/v2/embed", "/pooling", "/classify", "/inference/v1/generate", "/invocations", "/tokenize", "/detokenize"),
    *("/tokenizer_info", "/health", "/ping", "/version", "/load", "/metrics", "/metrics/", "/kv_event_sources"),
    *("/reset_prefix_cache", "/reset_mm_cache", "/sleep", "/wake_up", "/is_sleeping", "/collective_rpc", "/server_info"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/start_profile", "/scale_elastic_ep", "/is_scaling_elastic_ep"),
    *("/docs", "/redoc", "/openapi.json", "/", "//", "//health", "/%68ealth", "/health/..", "/no/such/path", "/v1/realtime"),
)
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def forged(key: str) -> list[list[tuple[str, str]]]:
    """Headers that are no proof of the key, some of them with the key in a wrong place."""
    return [
        [],
        [("authorization", "Bearer wrong")],
        [("authorization", f"Bearer {KEYS['alpha']}")],  # a client's key
        [("authorization", "Bearer ")],
        [("authorization", f"Basic {key}")],
        [("authorization", key)],
        [("authorization", f"Bearer {key}x")],
        [("authorization", f"Bearer {key[:-1]}")],
        [("x-api-key", key)],
        [("authorization", "Bearer wrong"), ("authorization", f"Bearer {key}")],
    ]


async def test_engines_answer_nobody_without_the_pools_key(pool: SimPool) -> None:
    url = pool.engine(pool.names[0]).url
    forbidden = {path for path in PATHS if classify("POST", path) is None}
    assert len(PATHS) - len(forbidden) > 25, "the list has the paths that are open to the pool"

    async def ask(method: str, path: str, headers: list[tuple[str, str]]) -> int:
        async with pool.http.request(method, URL(url + path, encoded=True), headers=headers) as answer:
            return answer.status

    for path in PATHS:
        answers = await asyncio.gather(*(ask(method, path, []) for method in METHODS))
        assert set(answers) == {401}, path
    for headers in forged(pool.local.engine_key):
        assert {await ask("POST", path, headers) for path in (CHAT, "/health", "/docs")} == {401}, headers
    right = [("authorization", f"Bearer {pool.local.engine_key}")]
    assert [await ask("GET", path, right) for path in ("/health", "/v1/models", "/docs")] == [200, 200, 404]


async def test_engines_refuse_before_they_read_a_body(pool: SimPool) -> None:
    url = URL(pool.engine(pool.names[0]).url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000\r\n\r\n{")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    finally:
        writer.close()
    assert head.startswith(b"HTTP/1.1 401 ")


async def test_engines_take_no_websocket(pool: SimPool) -> None:
    for headers in ({}, {"authorization": f"Bearer {pool.local.engine_key}"}):
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await pool.http.ws_connect(pool.engine(pool.names[0]).url + "/v1/realtime", headers=headers)
        assert refused.value.status in (401, 403, 404)


async def test_agents_tell_nothing_without_the_pools_key(pool: SimPool) -> None:
    url = pool.agent(pool.names[0]).url
    for headers in forged(pool.local.engine_key):
        for method, path in (
            ("GET", "/info"),
            ("GET", "/drain"),
            ("POST", "/drain"),
            ("DELETE", "/drain"),
            ("GET", "/stream"),
        ):
            async with pool.http.request(method, url + path, headers=headers) as answer:
                assert answer.status == 401, (method, path, headers)
    assert (await pool.info(pool.names[0])).drain.phase == "none"
