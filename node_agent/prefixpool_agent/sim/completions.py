"""`/v1/completions`: text, token ids, and lists of either."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from prefixpool_agent.sim.engine import Generation, Output
from prefixpool_agent.sim.exchange import DONE, Answer, ApiError, Call, event
from prefixpool_agent.sim.logprobs import completion_logprobs
from prefixpool_agent.sim.requests import CompletionRequest, parse
from prefixpool_agent.sim.serving import (
    FINGERPRINT,
    Serving,
    UsageOptions,
    answer_id,
    check_logprobs,
    check_replies,
    plain_usage,
)

_DEFAULT_MAX_TOKENS = 16  # OpenAI's default, which vLLM keeps for this endpoint


class Completions:
    """One instance serves all requests."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    def handle(self, call: Call) -> Answer:
        request = parse(call.body, CompletionRequest)
        serving = self._serving
        model = serving.check_model(request.model)
        limit = _DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        check_logprobs(request.logprobs)
        replies = check_replies(request, _count(request.prompt))
        prompts = self._prompts(request)
        asks = [serving.ask(p, request, call, max_tokens=limit, stop=request.stop, replies=replies) for p in prompts]
        generation = serving.engine.submit(*asks)
        echoes = [self._echo(prompt) if request.echo else "" for prompt in prompts]
        job = _Job(request, generation, answer_id("cmpl-", call), model, echoes)
        stream = bool(request.stream)
        return Answer(job.stream() if stream else job.whole(), stream, generation)

    def _echo(self, prompt: list[int]) -> str:
        return self._serving.tokenizer.decode(prompt, skip_special=False)

    def _prompts(self, request: CompletionRequest) -> list[list[int]]:
        prompt = request.prompt
        if not prompt:
            text = "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
            raise ApiError(400, text, param="prompt")
        if isinstance(prompt, str):
            return [self._serving.encode(prompt)]
        if isinstance(prompt[0], int):
            return [self._token_prompt(prompt)]
        return [self._serving.encode(part) if isinstance(part, str) else self._token_prompt(part) for part in prompt]

    def _token_prompt(self, prompt: Any) -> list[int]:
        if not isinstance(prompt, list) or not prompt or not all(isinstance(token, int) for token in prompt):
            raise ApiError(400, "a prompt must be a text or a non-empty list of token ids", param="prompt")
        self._serving.check_tokens(prompt)
        return list(prompt)


def _count(prompt: Any) -> int:
    """Of the prompts in what a client sent: text, token ids, or a list of either."""
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


class _Job:
    """All prompts of one request, being written as a document or as chunks. `echoes`: one text for each prompt."""

    def __init__(self, request: CompletionRequest, generation: Generation, id_: str, model: str, echoes: list[str]) -> None:
        self._request = request
        self._generation = generation
        self._id, self._model, self._created = id_, model, int(time.time())
        self._echoes = echoes

    async def whole(self) -> AsyncIterator[bytes]:
        outputs: dict[int, list[Output]] = {}
        async for output in self._generation.outputs():
            outputs.setdefault(output.reply, []).append(output)
        usage = {**self._usage(), "completion_tokens_details": None}
        usage["prompt_tokens_details"] |= {"created_cache_tokens": None, "multimodal_tokens": None}
        yield msgspec.json.encode(
            {
                "id": self._id,
                "object": "text_completion",
                "created": self._created,
                "model": self._model,
                "choices": [self._choice(index, outputs[index]) for index in sorted(outputs)],
                "service_tier": None,
                "system_fingerprint": FINGERPRINT,
                "usage": usage,
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "metrics": None,
            }
        )

    def _choice(self, index: int, outputs: list[Output]) -> dict[str, Any]:
        tokens = [output.token for output in outputs if output.token is not None]
        echo = self._echo(index)
        return {
            "index": index,
            "text": echo + "".join(output.text for output in outputs),
            "logprobs": self._logprobs(tokens, len(echo)),
            "finish_reason": outputs[-1].finish,
            "stop_reason": outputs[-1].stop_reason,
            "token_ids": tokens if self._request.return_token_ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "routed_experts": None,
        }

    async def stream(self) -> AsyncIterator[bytes]:
        usage = UsageOptions.of(self._request)
        sent: dict[int, int] = {}
        async for output in self._generation.outputs():
            echo = "" if output.reply in sent else self._echo(output.reply)
            sent[output.reply] = sent.get(output.reply, 0) + (output.token is not None)
            chunk = self._chunk(echo, output)
            if usage.continuous:
                prompt = self._generation.sequences[output.reply].prompt_tokens
                chunk["usage"] = plain_usage(prompt, sent[output.reply])
            yield event(chunk)
        if usage.final:
            yield event(self._head([]) | {"usage": self._usage(), "system_fingerprint": FINGERPRINT})
        yield DONE

    def _chunk(self, echo: str, output: Output) -> dict[str, Any]:
        tokens = [] if output.token is None else [output.token]
        choice = {
            "index": output.reply,
            "text": echo + output.text,
            "logprobs": self._logprobs(tokens, 0),
            "finish_reason": output.finish,
            "stop_reason": output.stop_reason,
            "prompt_token_ids": None,
            "token_ids": tokens if self._request.return_token_ids else None,
        }
        return self._head([choice])

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._generation.replies]

    def _logprobs(self, tokens: list[int], offset: int) -> dict[str, Any] | None:
        top = self._request.logprobs
        return None if top is None else completion_logprobs(tokens, top, offset)

    def _head(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _usage(self) -> dict[str, Any]:
        generation = self._generation
        return {
            **plain_usage(generation.prompt_tokens, generation.output_tokens),
            "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
        }
