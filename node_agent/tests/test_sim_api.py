"""The sim over HTTP: each recorded request of vLLM 0.32 gets the same answer in everything but the words."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from prefixpool_agent.sim.server import SimServer, running
from prefixpool_agent.sim.settings import SimSettings

RECORDED: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data/vllm_0_32_answers.json").read_text())
SETTINGS = SimSettings(
    model="m", served_model_name=("m", "alias"), max_model_len=4096, num_gpu_blocks_override=200, time_scale=0
)
SLOW = msgspec.structs.replace(SETTINGS, time_scale=1, decode_step_s=0.02, prefill_s_per_token=0, prefill_s_per_token2=0)
CHAT = "/v1/chat/completions"
X_TOKEN = 1 << 28 | ord("x")
LONG = [{"role": "user", "content": " ".join(f"word{i}" for i in range(60))}]


@pytest.fixture
async def sim() -> AsyncIterator[tuple[SimServer, str]]:
    async with running(SETTINGS) as both:
        yield both


@pytest.fixture
async def session(sim: tuple[SimServer, str]) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(sim[1], timeout=aiohttp.ClientTimeout(20)) as made:
        yield made


async def post(session: aiohttp.ClientSession, path: str, body: Any, **headers: str) -> Any:
    async with session.post(path, json=body, headers=headers) as answer:
        return await answer.json()


async def stream(session: aiohttp.ClientSession, path: str, body: Any) -> list[dict[str, Any]]:
    async with session.post(path, json={**body, "stream": True}) as answer:
        return events(await answer.text())


def events(text: str) -> list[Any]:
    data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in data if line != "[DONE]"]


def shape(value: Any) -> Any:
    """What must be equal: keys and types. None stands for whatever is there."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [shape(value[0])] if value and isinstance(value[0], dict) else "list"
    return "text" if isinstance(value, str) else "number"


def keys(value: Any) -> Any:
    """All keys, those of null fields too."""
    if isinstance(value, dict):
        value = {key: inner for key, inner in value.items() if key != "top_logprobs"}  # there, tokens are keys
        return {key: keys(inner) if isinstance(inner, dict | list) else 0 for key, inner in value.items()}
    if isinstance(value, list):
        return [keys(inner) for inner in value if isinstance(inner, dict)]
    return 0


def expand(value: Any) -> Any:
    """`{"$repeat": [text, n]}` stands for a long text."""
    if isinstance(value, dict):
        if "$repeat" in value:
            return value["$repeat"][0] * value["$repeat"][1]
        return {key: expand(inner) for key, inner in value.items()}
    return [expand(inner) for inner in value] if isinstance(value, list) else value


def same_but_for_the_words(ours: str, theirs: str, content_type: str | None) -> None:
    if content_type and content_type.startswith("text/event-stream"):
        names = [[line for line in text.split("\n") if line.startswith("event: ")] for text in (ours, theirs)]
        assert names[0] == names[1]
        assert [keys(event) for event in events(ours)] == [keys(event) for event in events(theirs)]
        assert [shape(event) for event in events(ours)] == [shape(event) for event in events(theirs)]
        assert ours.endswith("\n\n")
        return
    mine, recorded = json.loads(ours or "null"), json.loads(theirs or "null")
    if isinstance(recorded, dict) and recorded.get("error", {}).get("type") == "BadRequestError":
        assert mine == recorded
    elif isinstance(recorded, dict):
        assert keys(mine) == keys(recorded)


async def test_answers_are_vllms(session: aiohttp.ClientSession) -> None:
    """One server for all recorded requests, in their order."""
    for number, row in enumerate(RECORDED):
        data = row["raw"] if "raw" in row else json.dumps(expand(row["request"])) if "request" in row else None
        headers = {"content-type": "application/json", **row.get("headers", {})}
        async with session.request(row["method"], row["path"], data=data, headers=headers) as answer:
            text = await answer.text()
        expected_type = (row["type"] or answer.content_type).partition(";")[0]
        assert (number, answer.status, answer.content_type) == (number, row["status"], expected_type)
        same_but_for_the_words(text, row["answer"], row["type"])


async def test_usage_tells_what_was_cached(session: aiohttp.ClientSession) -> None:
    body = {"messages": LONG, "max_tokens": 3}
    first, again = [(await post(session, CHAT, body))["usage"] for _ in range(2)]
    full = first["prompt_tokens"] // 32 * 32
    assert first["prompt_tokens_details"] == {"cached_tokens": 0, "created_cache_tokens": full, "multimodal_tokens": None}
    assert again["prompt_tokens_details"]["cached_tokens"] == full
    assert again["prompt_tokens_details"]["created_cache_tokens"] == 0


async def test_all_apis_share_the_cache_of_one_conversation(session: aiohttp.ClientSession) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *LONG]
    await post(session, CHAT, {"messages": messages, "max_tokens": 1})
    anthropic = {"model": "m", "system": "Be brief.", "messages": LONG, "max_tokens": 3}
    usage = (await post(session, "/v1/messages", anthropic))["usage"]
    assert usage["cache_read_input_tokens"] > 0
    assert usage["cache_creation_input_tokens"] == 0
    parts = [{"role": "user", "content": [{"type": "input_text", "text": LONG[0]["content"]}]}]
    answer = await post(session, "/v1/responses", {"instructions": "Be brief.", "input": parts, "max_output_tokens": 3})
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] == usage["cache_read_input_tokens"]
    count = await post(session, "/v1/messages/count_tokens", {k: v for k, v in anthropic.items() if k != "max_tokens"})
    assert count["input_tokens"] == usage["cache_read_input_tokens"] + usage["input_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        (CHAT, {"messages": LONG, "max_tokens": 12}, lambda event: event["choices"][0]["delta"]["content"]),
        ("/v1/completions", {"prompt": "Once", "max_tokens": 12}, lambda event: event["choices"][0]["text"]),
        (
            "/v1/messages",
            {"model": "m", "messages": LONG, "max_tokens": 12},
            lambda event: event.get("delta", {}).get("text", ""),
        ),
        (
            "/v1/responses",
            {"input": "Hi", "max_output_tokens": 12},
            lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
        ),
    ],
    ids=["chat", "completions", "messages", "responses"],
)
async def test_a_stream_carries_the_same_text_as_the_whole_answer(
    session: aiohttp.ClientSession, path: str, body: dict[str, Any], text: Any
) -> None:
    whole = await post(session, path, body)
    streamed = "".join(text(event) for event in await stream(session, path, body))
    assert len(streamed) > 10
    assert json.dumps(streamed) in json.dumps(whole)


async def test_the_next_turn_finds_prompt_and_reply_in_the_cache(session: aiohttp.ClientSession) -> None:
    body = {"messages": LONG, "max_tokens": 500}
    answer = await post(session, CHAT, body)
    reply = answer["choices"][0]["message"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    turn = [*LONG, {"role": "assistant", "content": reply["content"]}, {"role": "user", "content": "And then?"}]
    usage = (await post(session, CHAT, {"messages": turn, "max_tokens": 1}))["usage"]
    cached = answer["usage"]["total_tokens"] - 1  # the last token of a reply is never computed
    assert usage["prompt_tokens_details"]["cached_tokens"] == cached // 32 * 32


async def test_a_stop_string_ends_the_text_before_it(session: aiohttp.ClientSession) -> None:
    body = {"messages": LONG, "max_tokens": 40}
    text = (await post(session, CHAT, body))["choices"][0]["message"]["content"]
    stop = text[20:24]
    expected = text[: text.index(stop)]
    choice = (await post(session, CHAT, {**body, "stop": [stop]}))["choices"][0]
    assert choice["message"]["content"] == expected
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    chunks = await stream(session, CHAT, {**body, "stop": stop})
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == expected
    messages = await post(
        session, "/v1/messages", {"model": "m", "messages": LONG, "max_tokens": 40, "stop_sequences": [stop]}
    )
    assert (messages["stop_reason"], messages["stop_sequence"]) == ("stop_sequence", stop)


async def test_several_choices_differ_and_are_numbered(session: aiohttp.ClientSession) -> None:
    body = {"messages": LONG, "max_tokens": 8, "n": 3}
    answer = await post(session, CHAT, body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in answer["choices"]}) == 3
    assert answer["usage"]["completion_tokens"] == 24
    chunks = await stream(session, CHAT, body)
    assert {chunk["choices"][0]["index"] for chunk in chunks} == {0, 1, 2}


async def test_prompt_lists_give_one_choice_each(session: aiohttp.ClientSession) -> None:
    tokens = (await post(session, "/tokenize", {"prompt": "Token prompt"}))["tokens"]
    answer = await post(session, "/v1/completions", {"prompt": ["A", "B"], "max_tokens": 2, "n": 2, "echo": True})
    assert [choice["text"][0] for choice in answer["choices"]] == ["A", "A", "B", "B"]
    one = await post(session, "/v1/completions", {"prompt": tokens, "max_tokens": 9})
    text = await post(session, "/v1/completions", {"prompt": "Token prompt", "max_tokens": 9})
    both = await post(session, "/v1/completions", {"prompt": [tokens, tokens[:2]], "max_tokens": 9})
    assert one["choices"][0]["text"] == text["choices"][0]["text"] == both["choices"][0]["text"]
    assert both["usage"]["prompt_tokens"] == len(tokens) + 2


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"prompt": [1 << 40]}, 400, "out of vocabulary"),
        ({"prompt": [[], [1]]}, 400, "prompt"),
        ({"prompt": "x", "cache_salt": ""}, 400, "cache_salt"),
        ({"prompt": "x", "n": 0}, 400, "n must be at least 1"),
        ({"prompt": "x", "min_tokens": 9, "max_tokens": 3}, 400, "min_tokens"),
        ({"prompt": ["x", ""]}, 400, "cannot be empty"),
        ({"prompt": [X_TOKEN] * 4096}, 400, "max_tokens must be at least 1, got 0"),
        ({"prompt": "x" * 100_000}, 400, "maximum context length is 4096"),
        ({"prompt": {"a": 1}}, 400, "validation error"),
    ],
)
async def test_what_is_refused(session: aiohttp.ClientSession, body: Any, status: int, words: str) -> None:
    async with session.post("/v1/completions", json=body) as answer:
        assert answer.status == status
        assert words in (await answer.json())["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (CHAT, {"n": 1 << 64}, "n must be at most 1024"),
        (CHAT, {"logprobs": True, "top_logprobs": 1 << 63}, "greater than max allowed: 20"),
        (CHAT, {"logprobs": True, "top_logprobs": -2}, "logprobs must be non-negative or -1"),
        ("/v1/completions", {"prompt": "x", "n": 1 << 64}, "n must be at most 1024"),
        ("/v1/completions", {"prompt": ["x"] * 600, "n": 2}, "600 prompts with n=2 are more than 1024 replies"),
        ("/v1/completions", {"prompt": "x", "logprobs": -1}, "greater than max allowed: 20"),
    ],
)
async def test_one_request_for_endless_replies_hung_every_engine_it_was_tried_on(
    session: aiohttp.ClientSession, path: str, body: Any, words: str
) -> None:
    messages = {"messages": LONG} if path == CHAT else {}
    async with session.post(path, json={**messages, "max_tokens": 1, **body}) as answer:
        assert answer.status == 400
        assert words in (await answer.json())["error"]["message"]


@pytest.mark.parametrize("raw", [b"", b"\xff\xfe", b'{"messages":' + b"[" * 50_000, b'{"messages":"\\ud800"}'])
async def test_broken_bodies_are_client_errors(session: aiohttp.ClientSession, raw: bytes) -> None:
    async with session.post(CHAT, data=raw) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["type"] == "Bad Request"


async def test_adapters_are_models_with_caches_of_their_own() -> None:
    settings = SimSettings(model="m", adapters=("lora",), time_scale=0)
    async with running(settings) as (_, url), aiohttp.ClientSession(url) as session:
        cached = []
        for model in ("m", "lora", "lora"):
            answer = await post(session, CHAT, {"model": model, "messages": LONG, "max_tokens": 1})
            assert answer["model"] == model
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
        async with session.get("/v1/models") as listing:
            names = [card["id"] for card in (await listing.json())["data"]]
    assert cached == [False, False, True]
    assert names == ["m", "lora"]


async def test_a_reset_empties_the_cache(session: aiohttp.ClientSession) -> None:
    body = {"messages": LONG, "max_tokens": 1}
    await post(session, CHAT, body)
    assert await post(session, "/reset_prefix_cache", None) == {"success": True}
    assert (await post(session, CHAT, body))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_embeddings_are_deterministic_and_of_length_one(session: aiohttp.ClientSession) -> None:
    answers = [await post(session, "/v1/embeddings", {"input": ["a", "b"]}) for _ in range(2)]
    vectors = [item["embedding"] for item in answers[0]["data"]]
    assert vectors == [item["embedding"] for item in answers[1]["data"]]
    assert vectors[0] != vectors[1]
    assert sum(x * x for x in vectors[0]) == pytest.approx(1)


async def metric(session: aiohttp.ClientSession, name: str) -> float:
    async with session.get("/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}{{"))


async def test_metrics_count_what_happened(session: aiohttp.ClientSession) -> None:
    body = {"messages": LONG, "max_tokens": 5}
    usage = [(await post(session, CHAT, body))["usage"] for _ in range(2)]
    cached = usage[1]["prompt_tokens_details"]["cached_tokens"]
    assert await metric(session, "prompt_tokens_total") == 2 * usage[0]["prompt_tokens"]
    assert await metric(session, "prompt_tokens_cached_total") == cached
    assert await metric(session, "prefix_cache_queries_total") == 2 * usage[0]["prompt_tokens"]
    assert await metric(session, "prefix_cache_hits_total") == cached
    assert await metric(session, "prompt_tokens_by_source_total") == 2 * usage[0]["prompt_tokens"]
    assert await metric(session, "generation_tokens_total") == 10
    assert await metric(session, "request_success_total") == 2
    assert await metric(session, "time_to_first_token_seconds_count") == 2
    assert await metric(session, "inter_token_latency_seconds_count") == 8
    assert await metric(session, "num_requests_running") == 0


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(condition)


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_client_that_goes_away_is_aborted(*, streaming: bool) -> None:
    async with running(SLOW) as (server, url), aiohttp.ClientSession(url) as session:
        scheduler = server.serving.engine.scheduler
        body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": streaming}
        request = asyncio.create_task(session.post("/v1/completions", json=body))
        await until(lambda: bool(scheduler.running))
        if streaming:
            (await request).close()
        else:
            request.cancel()
        await until(lambda: not scheduler.busy)
        assert scheduler.pool.free_blocks == scheduler.pool.usable
        assert await metric(session, "request_success_total") == 0  # as vLLM: such aborts are not counted


@pytest.mark.parametrize("streaming", [True, False])
async def test_stopping_answers_running_requests_with_abort(*, streaming: bool) -> None:
    async with running(SLOW) as (server, url), aiohttp.ClientSession(url) as session:
        body = {"messages": LONG, "max_tokens": 3000, "ignore_eos": True, "stream": streaming}
        request = asyncio.create_task(session.post(CHAT, json=body))
        scheduler = server.serving.engine.scheduler
        await until(lambda: any(sequence.output_tokens > 2 for sequence in scheduler.running))
        server.stop()
        async with await request as answer:
            text = await answer.text()
        chunk = events(text)[-1] if streaming else json.loads(text)
        assert answer.status == 200
        assert chunk["choices"][0]["finish_reason"] == "abort"


async def test_many_streams_at_once_are_each_complete_and_correct(session: aiohttp.ClientSession) -> None:
    async def one(number: int) -> str:
        chunks = await stream(
            session, "/v1/completions", {"prompt": f"story {number % 7}", "max_tokens": 40, "ignore_eos": True}
        )
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

    texts = await asyncio.gather(*map(one, range(100)))
    assert [texts[i] for i in range(100)] == [texts[i % 7] for i in range(100)]
    assert len(set(texts)) == 7


async def test_a_fault_in_the_engine_ends_requests_and_server_instead_of_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> Any:
        raise RuntimeError("a bug, as it were")

    async with running(SETTINGS) as (server, url), aiohttp.ClientSession(url) as session:
        monkeypatch.setattr(server.serving.engine.scheduler, "sample", broken)
        answer = await post(session, CHAT, {"messages": LONG, "max_tokens": 3})
        assert answer["choices"][0]["finish_reason"] == "abort"
        assert server.serving.engine.failed.is_set()
