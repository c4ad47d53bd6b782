"""Clients of pools in a cluster: the SDKs that people use, keys, and two pools that have nothing of each other."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from hashlib import sha256

import anthropic
import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from prefixpool import names
from prefixpool_operator import kube
from prefixpool_testing.cluster.product import MODEL, PoolPlace
from prefixpool_testing.eventually import eventually
from prefixpool_testing.pool_client import CHAT, chat
from prefixpool_testing.sim_pool import text

ALPHA, BETA = "key of alpha", "key of beta"
GREEDY = {"temperature": 0}
KEYS = {"alpha": ALPHA, "beta": BETA}


async def secured(place: PoolPlace, pool: str, keys: dict[str, str]) -> None:
    """A pool with these keys by scope."""
    lines = "".join(f"{sha256(key.encode()).hexdigest()} {scope}\n" for scope, key in keys.items())
    meta = {"name": f"{pool}-api-keys", "namespace": place.namespace}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": {"keys": lines}}
    await asyncio.to_thread(place.api.apply, secret)
    await place.apply(pool, replicas=2, auth={"keysSecret": meta["name"]})


async def test_openai_and_anthropic_sdks_with_keys(place: PoolPlace) -> None:
    await secured(place, "sdk", KEYS)
    await place.until_ready("sdk", 2)
    url = await place.url_of("sdk")
    said = text("asked by an SDK", 300)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=ALPHA, max_retries=0) as client:
        written = await openai_answers(client, said)
    async with anthropic.AsyncAnthropic(base_url=url, api_key=ALPHA, max_retries=0) as client:
        assert await anthropic_answers(client, said) == written
    async with anthropic.AsyncAnthropic(base_url=url, api_key=BETA, max_retries=0) as client:
        answer = await client.messages.create(model=MODEL, max_tokens=8, messages=[{"role": "user", "content": said}])
        assert not answer.usage.cache_read_input_tokens, "what another scope has said is not cached for this one"
    await assert_refused(url)
    assert (await (await place.client_of("sdk")).post(CHAT, chat(said))).status == 401, "without a key"


async def openai_answers(client: openai.AsyncOpenAI, said: str) -> str:
    """The same greedy chat, whole until it is cached, then streamed; what was written."""
    ask = client.chat.completions
    messages: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": said}]
    first = await ask.with_raw_response.create(model=MODEL, messages=messages, max_tokens=8, temperature=0)
    whole = first.parse()

    async def reused() -> bool:
        raw = await ask.with_raw_response.create(model=MODEL, messages=messages, max_tokens=8, temperature=0)
        usage = raw.parse().usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        same = raw.headers[names.H_REPLICA] == first.headers[names.H_REPLICA]
        return same and (usage.prompt_tokens_details.cached_tokens or 0) > 500

    await eventually(reused, what="the same chat is served from the cache of the same replica")
    streamed = await ask.create(model=MODEL, messages=messages, max_tokens=8, temperature=0, stream=True)
    pieces = [choice.delta.content or "" async for chunk in streamed for choice in chunk.choices]
    assert len(pieces) > 1
    assert "".join(pieces) == whole.choices[0].message.content
    response = await client.responses.create(model=MODEL, input=said, max_output_tokens=8, temperature=0, store=False)
    assert response.output_text == "".join(pieces)
    assert [model.id async for model in client.models.list()] == [MODEL]
    return response.output_text


async def anthropic_answers(client: anthropic.AsyncAnthropic, said: str) -> str:
    """Whole and streamed; what was written."""
    messages: list[anthropic.types.MessageParam] = [{"role": "user", "content": said}]
    whole = await client.messages.create(model=MODEL, max_tokens=8, messages=messages, extra_body=GREEDY)
    assert (whole.usage.cache_read_input_tokens or 0) > 500, "openai's client has asked the same"
    async with client.messages.stream(model=MODEL, max_tokens=8, messages=messages, extra_body=GREEDY) as stream:
        written = await stream.get_final_text()
    assert [block.text for block in whole.content if block.type == "text"] == [written]
    return written


async def assert_refused(url: str) -> None:
    """Both SDKs call a wrong key by its name."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
    async with anthropic.AsyncAnthropic(base_url=url, api_key="wrong", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(model=MODEL, max_tokens=8, messages=[{"role": "user", "content": "hello"}])


async def test_two_pools_in_one_namespace_have_nothing_of_each_other(place: PoolPlace) -> None:
    await secured(place, "one", {"alpha": ALPHA})
    await secured(place, "two", {"alpha": BETA})
    for pool in ("one", "two"):
        await place.until_ready(pool, 2)
        assert {view.name for router in (await place.routers(pool)).values() for view in router.replicas} == {
            f"{pool}-0",
            f"{pool}-1",
        }
    said = text("said to both", 300)
    for pool, key, other in (("one", ALPHA, BETA), ("two", BETA, ALPHA)):
        client = await place.client_of(pool, key)
        first = await client.chat(said)
        assert (first.replica.startswith(f"{pool}-"), first.predicted, first.cached) == (True, 0, 0)
        assert (await client.chat(said)).cached > 0
        assert (await (await place.client_of(pool, other)).post(CHAT, chat(said))).status == 401
    keys = [await secrets(place, pool) for pool in ("one", "two")]
    assert len({*keys[0], *keys[1]}) == 4, "engine keys and salts are all different"
    (pod, *_) = await place.workers("one")
    assert (await place.engine_of(pod, keys[0][0]).get("/v1/models")).status == 200
    assert (await place.engine_of(pod, keys[1][0]).get("/v1/models")).status == 401


async def secrets(place: PoolPlace, pool: str) -> tuple[str, str]:
    """The key of its engines, and what salts are made from."""
    secret = await place.get(kube.SECRET, f"{pool}-keys")
    assert secret is not None
    return b64decode(secret["data"]["engine"]).decode().strip(), secret["data"]["salt"]
