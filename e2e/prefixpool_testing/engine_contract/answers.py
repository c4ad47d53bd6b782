"""What an engine answers: the APIs, whole and streamed, usage, tokens, names, ids, errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prefixpool_testing.engine_contract.asks import (
    APIS,
    MODEL,
    ask,
    body_of,
    exactly,
    reusable,
    stream,
    text,
    tokens_of,
)
from prefixpool_testing.engine_worker import MAX_MODEL_LEN, EngineWorker
from prefixpool_testing.pool_client import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Reply

every_api = pytest.mark.parametrize("path", APIS)


class AnswerContract:
    """Of requests, one at a time."""

    def test_health_models_and_version(self, engine_worker: EngineWorker) -> None:
        assert engine_worker.get("/health").status == 200
        (model,) = engine_worker.get("/v1/models").json()["data"]
        assert (model["id"], model["max_model_len"]) == (MODEL, MAX_MODEL_LEN)
        assert engine_worker.get("/version").json()["version"]

    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
    def test_reply_has_the_length_that_was_asked_for(self, engine_worker: EngineWorker, path: str) -> None:
        body = body_of(path, text(f"{path} length", 20), tokens=7, ignore_eos=True)
        answer = ask(engine_worker, path, body).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        usage = answer["usage"]
        assert usage["completion_tokens"] == 7
        assert usage["total_tokens"] == usage["prompt_tokens"] + 7

    @every_api
    def test_repeat_is_cached_up_to_the_last_whole_block_before_its_end(
        self, engine_worker: EngineWorker, path: str
    ) -> None:
        body = body_of(path, text(f"{path} twice"))
        first, second = (ask(engine_worker, path, body) for _ in range(2))
        assert first.cached < second.prompt // 2, "at most the template's own first words were known"
        assert second.prompt == first.prompt
        assert second.cached == reusable(second.prompt) > 0

    @every_api
    def test_stream_says_what_the_whole_answer_says(self, engine_worker: EngineWorker, path: str) -> None:
        body = body_of(path, text(f"{path} streamed"), tokens=6)
        ask(engine_worker, path, body)  # so that both of the others compute the same
        whole = ask(engine_worker, path, body)
        streamed = stream(engine_worker, path, body)
        assert streamed.done
        assert streamed.text == whole.text
        told = Reply(200, {}, json.dumps({"usage": streamed.usage}).encode())
        assert (told.prompt, told.cached) == (whole.prompt, whole.cached)

    @pytest.mark.parametrize(("tokens", "cached"), [(31, 0), (32, 0), (33, 32), (64, 32), (65, 64), (96, 64), (97, 96)])
    def test_one_token_is_always_computed(self, engine_worker: EngineWorker, tokens: int, cached: int) -> None:
        body = {"model": MODEL, "prompt": exactly(engine_worker, f"{tokens} exactly", tokens), "max_tokens": 1}
        first, second = (ask(engine_worker, COMPLETIONS, body) for _ in range(2))
        assert (first.prompt, first.cached) == (tokens, 0)
        assert (second.prompt, second.cached) == (tokens, cached)

    def test_stream_tells_usage_to_those_who_ask_only(self, engine_worker: EngineWorker) -> None:
        body = body_of(CHAT, text("silent usage", 20), stream=True)
        assert b'"usage":{' not in engine_worker.post(CHAT, body).body
        assert stream(engine_worker, CHAT, body).usage["completion_tokens"] > 0

    def test_messages_usage_adds_up(self, engine_worker: EngineWorker) -> None:
        body = body_of(MESSAGES, text("anthropic usage"))
        ask(engine_worker, MESSAGES, body)
        usage = ask(engine_worker, MESSAGES, body).json()["usage"]
        counted = engine_worker.post("/v1/messages/count_tokens", {"model": MODEL, "messages": body["messages"]}).json()
        created, read = usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"]
        assert usage["input_tokens"] + created + read == counted["input_tokens"]
        assert read == reusable(counted["input_tokens"])

    def test_tokenize_counts_what_requests_cost(self, engine_worker: EngineWorker) -> None:
        said = text("counted", 30)
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": said}]
        chat = ask(engine_worker, CHAT, {"model": MODEL, "messages": messages, "max_tokens": 1})
        assert len(tokens_of(engine_worker, messages=messages)) == chat.prompt
        page = ask(engine_worker, COMPLETIONS, body_of(COMPLETIONS, said, tokens=1))
        assert len(tokens_of(engine_worker, prompt=said)) == page.prompt

    def test_chat_turn_begins_with_the_tokens_of_the_turns_before(self, engine_worker: EngineWorker) -> None:
        said: list[dict[str, str]] = [{"role": "user", "content": text("first turn", 40)}]
        before = tokens_of(engine_worker, messages=said)
        said += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Go on."}]
        assert tokens_of(engine_worker, messages=said)[: len(before)] == before

    @every_api
    def test_unknown_model_is_404(self, engine_worker: EngineWorker, path: str) -> None:
        answer = engine_worker.post(path, body_of(path, "hello", model="no-such-model"))
        assert answer.status == 404
        assert "no-such-model" in answer.json()["error"]["message"]

    @every_api
    def test_prompt_that_is_too_long_is_400(self, engine_worker: EngineWorker, path: str) -> None:
        answer = engine_worker.post(path, body_of(path, text("too long", MAX_MODEL_LEN)))
        assert answer.status == 400
        assert str(MAX_MODEL_LEN) in answer.json()["error"]["message"]

    @pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe{", b"[" * 20_000, b'{"model":1}'])
    def test_malformed_request_is_a_client_error(self, engine_worker: EngineWorker, body: bytes) -> None:
        for path in (CHAT, RESPONSES):
            assert 400 <= engine_worker.ask("POST", path, body).status < 500
        assert ask(engine_worker, CHAT, body_of(CHAT, "hello")).prompt > 0

    @every_api
    def test_request_id_comes_back(self, engine_worker: EngineWorker, path: str) -> None:
        reply = ask(engine_worker, path, body_of(path, "hello"), x_request_id="id-of-a-client")
        assert reply.headers["x-request-id"] == "id-of-a-client"
        if path in (CHAT, COMPLETIONS):
            assert "id-of-a-client" in reply.json()["id"]

    def test_unknown_fields_are_ignored(self, engine_worker: EngineWorker) -> None:
        more: dict[str, Any] = {"prompt_cache_key": "k", "something_new": {"a": [1]}, "user": "u"}
        assert ask(engine_worker, CHAT, body_of(CHAT, "hello", **more)).prompt > 0
