"""`/v1/responses` without a store: answers and events as recorded from vLLM 0.32."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from prefixpool_agent.sim.engine import Generation, Output
from prefixpool_agent.sim.exchange import Answer, ApiError, Call
from prefixpool_agent.sim.requests import ResponsesRequest, parse
from prefixpool_agent.sim.serving import Serving, answer_id, created_cache_tokens

_MESSAGE_TYPES = (None, "message")
_UNUSED = (  # fields of vLLM's answer that are null here
    *("max_tool_calls", "previous_response_id", "prompt", "reasoning", "text", "top_logprobs", "user"),
    *("kv_transfer_params", "ec_transfer_params", "input_messages", "output_messages"),
)


class Responses:
    """One instance serves all requests."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    def handle(self, call: Call) -> Answer:
        request = parse(call.body, ResponsesRequest)
        serving = self._serving
        model = serving.check_model(request.model)
        if request.previous_response_id is not None:
            raise _not_found(request.previous_response_id)
        prompt = serving.render(chat_messages(request), request.tools)
        ask = serving.ask(prompt, request, call, max_tokens=request.max_output_tokens)
        generation = serving.engine.submit(ask)
        turn = _Turn(request, generation, answer_id("resp_", call), model, serving.engine.scheduler.config.block_tokens)
        stream = bool(request.stream)
        return Answer(turn.stream() if stream else turn.whole(), stream, generation)

    def retrieve(self, call: Call) -> Answer:
        """Nothing is stored, so nothing is found."""
        raise _not_found(call.path.rpartition("/")[2])


def _not_found(id_: str) -> ApiError:
    return ApiError(404, f"Response with id '{id_}' not found.", kind="invalid_request_error", param="response_id")


class _Turn:
    """One request and its generation, being written as a document or as events."""

    def __init__(self, request: ResponsesRequest, generation: Generation, id_: str, model: str, block_tokens: int) -> None:
        self._request = request
        self._generation = generation
        self._block_tokens = block_tokens
        self._id, self._model, self._created = id_, model, int(time.time())
        self._message_id = f"msg_{secrets.token_hex(8)}"
        self._number = 0

    async def whole(self) -> AsyncIterator[bytes]:
        texts: list[str] = []
        end = Output(0, None, "")
        async for output in self._generation.outputs():
            texts.append(output.text)
            end = output
        yield msgspec.json.encode(self._completed("".join(texts), end))

    async def stream(self) -> AsyncIterator[bytes]:
        start = self._response("in_progress", [], None)
        yield self._event("response.created", response=start)
        yield self._event("response.in_progress", response=start)
        texts: list[str] = []
        end = Output(0, None, "")
        async for output in self._generation.outputs():
            if not texts:
                yield self._opening()
            texts.append(output.text)
            end = output
            if output.text:
                yield self._text_event("response.output_text.delta", delta=output.text)
        text = "".join(texts)
        yield self._closing(text)
        yield self._event("response.completed", response=self._completed(text, end))

    def _opening(self) -> bytes:
        item = self._message([], "in_progress")
        part = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
        return self._event("response.output_item.added", item=item, output_index=0) + self._event(
            "response.content_part.added", content_index=0, item_id=self._message_id, output_index=0, part=part
        )

    def _closing(self, text: str) -> bytes:
        return b"".join(
            (
                self._text_event("response.output_text.done", text=text),
                self._event(
                    "response.content_part.done",
                    content_index=0,
                    item_id=self._message_id,
                    output_index=0,
                    part=_output_text(text),
                ),
                self._event(
                    "response.output_item.done", item=self._message([_output_text(text)], "completed"), output_index=0
                ),
            )
        )

    def _text_event(self, kind: str, **fields: str) -> bytes:
        return self._event(kind, content_index=0, item_id=self._message_id, logprobs=[], output_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = msgspec.json.encode({**fields, "sequence_number": self._number, "type": kind})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def _message(self, content: list[dict[str, Any]], status: str) -> dict[str, Any]:
        return {
            "id": self._message_id,
            "content": content,
            "role": "assistant",
            "status": status,
            "type": "message",
            "phase": None,
        }

    def _completed(self, text: str, end: Output) -> dict[str, Any]:
        incomplete = "max_output_tokens" if end.finish == "length" else None
        status = {"length": "incomplete", "abort": "cancelled"}.get(end.finish or "", "completed")
        return self._response(status, [self._message([_output_text(text)], "completed")], self._usage(), incomplete)

    def _response(
        self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None, incomplete: str | None = None
    ) -> dict[str, Any]:
        request = self._request
        return {
            "id": self._id,
            "created_at": self._created,
            "incomplete_details": {"reason": incomplete} if incomplete else None,
            "instructions": request.instructions,
            "metadata": request.metadata,
            "model": self._model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": True,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "tool_choice": "none",
            "tools": request.tools or [],
            "top_p": 1.0,
            "background": False,
            "max_output_tokens": self._generation.sequences[0].limits.max_tokens,
            "service_tier": "auto",
            "status": status,
            "truncation": "disabled",
            "usage": usage,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            **dict.fromkeys(_UNUSED),
        }

    def _usage(self) -> dict[str, Any]:
        generation = self._generation
        return {
            "input_tokens": generation.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": generation.cached_tokens,
                "cache_write_tokens": created_cache_tokens(generation, self._block_tokens),
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": generation.output_tokens,
            "output_tokens_details": {
                "reasoning_tokens": 0,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": generation.prompt_tokens + generation.output_tokens,
        }


def _output_text(text: str) -> dict[str, Any]:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}


def chat_messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    """Instructions, then the input's items as chat messages. Raises ApiError for items it does not know."""
    out: list[dict[str, Any]] = []
    if request.instructions:
        out.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*out, {"role": "user", "content": request.input}]
    return out + [_chat_message(item) for item in request.input]


def _chat_message(item: dict[str, Any]) -> dict[str, Any]:
    kind = item.get("type")
    if kind in _MESSAGE_TYPES:
        return {"role": item.get("role"), "content": item.get("content")}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
    raise ApiError(400, f"input items of type {kind!r} are not supported", param="input")
