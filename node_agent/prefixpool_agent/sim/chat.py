"""`/v1/chat/completions`: the fields and chunks of vLLM 0.32, as recorded from it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from prefixpool_agent.sim.engine import Generation, Output
from prefixpool_agent.sim.exchange import DONE, Answer, Call, event
from prefixpool_agent.sim.logprobs import chat_logprobs
from prefixpool_agent.sim.requests import ChatRequest, parse
from prefixpool_agent.sim.serving import (
    FINGERPRINT,
    Serving,
    UsageOptions,
    answer_id,
    check_logprobs,
    check_replies,
    created_cache_tokens,
    plain_usage,
)


class Chat:
    """One instance serves all requests."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    def handle(self, call: Call) -> Answer:
        request = parse(call.body, ChatRequest)
        serving = self._serving
        model = serving.check_model(request.model)
        prompt = serving.render(
            request.messages,
            request.tools,
            add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
            continue_final_message=request.continue_final_message,
        )
        limit = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        check_logprobs(request.top_logprobs)
        replies = check_replies(request)
        ask = serving.ask(prompt, request, call, max_tokens=limit, stop=request.stop, replies=replies)
        generation = serving.engine.submit(ask)
        turn = _Turn(request, generation, answer_id("chatcmpl-", call), model, serving.engine.scheduler.config.block_tokens)
        stream = bool(request.stream)
        return Answer(turn.stream() if stream else turn.whole(), stream, generation)


class _Turn:
    """One request and its generation, being written as a document or as chunks."""

    def __init__(self, request: ChatRequest, generation: Generation, id_: str, model: str, block_tokens: int) -> None:
        self._request = request
        self._generation = generation
        self._block_tokens = block_tokens
        self._id, self._model, self._created = id_, model, int(time.time())

    async def whole(self) -> AsyncIterator[bytes]:
        texts: dict[int, list[str]] = {}
        tokens: dict[int, list[int]] = {}
        ends: dict[int, Output] = {}
        async for output in self._generation.outputs():
            texts.setdefault(output.reply, []).append(output.text)
            if output.token is not None:
                tokens.setdefault(output.reply, []).append(output.token)
            if output.finish is not None:
                ends[output.reply] = output
        choices = [self._choice(ends[i], "".join(texts.get(i, ())), tokens.get(i, [])) for i in sorted(ends)]
        usage = {**self._usage(), "completion_tokens_details": None}
        usage["prompt_tokens_details"]["multimodal_tokens"] = None
        yield msgspec.json.encode(
            {
                "id": self._id,
                "object": "chat.completion",
                "created": self._created,
                "model": self._model,
                "choices": choices,
                "service_tier": None,
                "system_fingerprint": FINGERPRINT,
                "usage": usage,
                "prompt_logprobs": None,
                "prompt_token_ids": self._prompt_ids(),
                "prompt_text": None,
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "metrics": None,
            }
        )

    def _choice(self, end: Output, text: str, tokens: list[int]) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None, "annotations": None, "audio": None}
        request = self._request
        return {
            "index": end.reply,
            "message": {**message, "function_call": None, "reasoning": None},
            "logprobs": chat_logprobs(tokens, request.top_logprobs or 0) if request.logprobs else None,
            "finish_reason": end.finish,
            "stop_reason": end.stop_reason,
            "token_ids": tokens if request.return_token_ids else None,
            "routed_experts": None,
        }

    async def stream(self) -> AsyncIterator[bytes]:
        usage = UsageOptions.of(self._request)
        sent = [0] * len(self._generation.sequences)
        first = True
        async for output in self._generation.outputs():
            if first:
                first = False
                yield b"".join(self._role(index, usage) for index in range(len(sent)))
            sent[output.reply] += output.token is not None
            yield self._chunk(self._delta(output), sent[output.reply], usage, last=output.finish is not None)
        if usage.final:
            yield event(self._head([]) | {"usage": self._usage(), "system_fingerprint": FINGERPRINT})
        yield DONE

    def _role(self, index: int, usage: UsageOptions) -> bytes:
        delta = {"role": "assistant", "content": ""}
        chunk = self._head([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
        if usage.continuous:
            chunk["usage"] = {**plain_usage(self._generation.prompt_tokens, 0), "completion_tokens_details": None}
        chunk |= {"prompt_token_ids": self._prompt_ids(), "prompt_text": None}
        return event(chunk)

    def _delta(self, output: Output) -> dict[str, Any]:
        request = self._request
        tokens = [] if output.token is None else [output.token]
        choice: dict[str, Any] = {
            "index": output.reply,
            "delta": {"content": output.text},
            "logprobs": chat_logprobs(tokens, request.top_logprobs or 0) if request.logprobs else None,
            "finish_reason": output.finish,
        }
        if output.finish is not None:
            choice["stop_reason"] = output.stop_reason
        choice["token_ids"] = tokens if request.return_token_ids else None
        return choice

    def _chunk(self, choice: dict[str, Any], output_tokens: int, usage: UsageOptions, *, last: bool) -> bytes:
        chunk = self._head([choice])
        if last and not usage.final:
            chunk["system_fingerprint"] = FINGERPRINT
        if usage.continuous:
            usage_now = plain_usage(self._generation.prompt_tokens, output_tokens)
            chunk["usage"] = {**usage_now, "completion_tokens_details": None}
        return event(chunk)

    def _head(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _usage(self) -> dict[str, Any]:
        generation = self._generation
        details = {
            "cached_tokens": generation.cached_tokens,
            "created_cache_tokens": created_cache_tokens(generation, self._block_tokens),
        }
        return {**plain_usage(generation.prompt_tokens, generation.output_tokens), "prompt_tokens_details": details}

    def _prompt_ids(self) -> list[int] | None:
        if not self._request.return_token_ids:
            return None
        return self._generation.sequences[0].tokens[: self._generation.prompt_tokens]
