"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API as vLLM 0.32 speaks it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import msgspec

from prefixpool_agent.sim.engine import Generation, Output
from prefixpool_agent.sim.exchange import Answer, ApiError, Call, document
from prefixpool_agent.sim.requests import CountTokensRequest, MessagesRequest, parse
from prefixpool_agent.sim.serving import Serving, answer_id, created_cache_tokens

_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "abort": "end_turn"}


class Messages:
    """One instance serves all requests."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    def handle(self, call: Call) -> Answer:
        request = parse(call.body, MessagesRequest)
        if request.max_tokens < 1:
            text = "1 validation error:\n  Value error, max_tokens must be positive"
            raise ApiError(400, text, kind="Bad Request", param="body.max_tokens")
        serving = self._serving
        model = serving.check_model(request.model)
        prompt = self._render(request)
        ask = serving.ask(prompt, request, call, max_tokens=request.max_tokens, stop=request.stop_sequences)
        generation = serving.engine.submit(ask)
        block_tokens = serving.engine.scheduler.config.block_tokens
        turn = _Turn(generation, answer_id("chatcmpl-", call), model, block_tokens)
        stream = bool(request.stream)
        return Answer(turn.stream() if stream else turn.whole(), stream, generation)

    def count_tokens(self, call: Call) -> Answer:
        request = parse(call.body, CountTokensRequest)
        self._serving.check_model(request.model)
        count = len(self._render(request))
        return document({"input_tokens": count, "context_management": {"original_input_tokens": count}})

    def _render(self, request: MessagesRequest | CountTokensRequest) -> list[int]:
        return self._serving.render(chat_messages(request.system, request.messages), chat_tools(request.tools))


class _Turn:
    """One request and its generation, being written as a document or as events."""

    def __init__(self, generation: Generation, id_: str, model: str, block_tokens: int) -> None:
        self._generation = generation
        self._id, self._model = id_, model
        self._block_tokens = block_tokens

    async def whole(self) -> AsyncIterator[bytes]:
        texts: list[str] = []
        end = Output(0, None, "")
        async for output in self._generation.outputs():
            texts.append(output.text)
            end = output
        message = self._message([{"type": "text", "text": "".join(texts)}])
        yield msgspec.json.encode(message | _stop(end) | {"usage": self._usage()})

    async def stream(self) -> AsyncIterator[bytes]:
        opened = False
        end = Output(0, None, "")
        async for output in self._generation.outputs():
            if end.token is None:
                # Without cache figures: vLLM knows them here, but sends them with the last event only.
                usage = {"input_tokens": self._generation.prompt_tokens, "output_tokens": 0}
                message = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": usage}
                yield _event({"type": "message_start", "message": message})
            end = output if output.token is not None or output.finish is not None else end
            if output.text and not opened:
                opened = True
                yield _event({"type": "content_block_start", "content_block": {"type": "text", "text": ""}, "index": 0})
            if output.text:
                delta = {"type": "text_delta", "text": output.text}
                yield _event({"type": "content_block_delta", "delta": delta, "index": 0})
        if opened:
            yield _event({"type": "content_block_stop", "index": 0})
        yield _event({"type": "message_delta", "delta": {"stop_sequence": None} | _stop(end), "usage": self._usage()})
        yield _event({"type": "message_stop"})

    def _message(self, content: list[dict[str, str]]) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "content": content, "model": self._model}

    def _usage(self) -> dict[str, int]:
        """Disjoint parts of the prompt, as Anthropic counts; all of them physical."""
        generation = self._generation
        cached, created = generation.cached_tokens, created_cache_tokens(generation, self._block_tokens)
        return {
            "input_tokens": generation.prompt_tokens - cached - created,
            "output_tokens": generation.output_tokens,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": cached,
        }


def _stop(end: Output) -> dict[str, str | None]:
    if isinstance(end.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_reason}
    return {"stop_reason": _STOP_REASONS[end.finish or "stop"]}


def _event(data: dict[str, Any]) -> bytes:
    return b"event: " + str(data["type"]).encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"


def chat_messages(system: str | list[dict[str, Any]] | None, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Anthropic's messages as chat messages: system text joined, tool results as messages of their own."""
    out: list[dict[str, Any]] = []
    if system:
        text = system if isinstance(system, str) else "".join(str(part.get("text", "")) for part in system)
        out.append({"role": "system", "content": text})
    for message in messages:
        out += _chat_message(message)
    return out


def _chat_message(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    if not isinstance(content, list):
        return [message]
    parts = [part for part in content if isinstance(part, dict)]
    results = [
        {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": _result_text(part.get("content"))}
        for part in parts
        if part.get("type") == "tool_result"
    ]
    calls = [_call(part) for part in parts if part.get("type") == "tool_use"]
    rest = [part for part in parts if part.get("type") not in ("tool_result", "tool_use", "thinking", "redacted_thinking")]
    chat: dict[str, Any] = {"role": message.get("role"), "content": rest}
    if calls:
        chat["tool_calls"] = calls
    return [*results, *([chat] if rest or calls else [])]


def _call(part: dict[str, Any]) -> dict[str, Any]:
    function = {"name": part.get("name"), "arguments": json.dumps(part.get("input") or {})}
    return {"id": part.get("id"), "type": "function", "function": function}


def _result_text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def chat_tools(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Anthropic's tools as chat tools."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.get("name"),
                "description": tool.get("description"),
                "parameters": tool.get("input_schema"),
            },
        }
        for tool in tools or ()
    ]
