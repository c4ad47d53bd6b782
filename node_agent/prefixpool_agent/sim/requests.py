"""Bodies of the generation endpoints, parsed once. Unknown fields are ignored, as vLLM does."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from prefixpool_agent.sim.exchange import ApiError

T = TypeVar("T", bound=msgspec.Struct)


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's, and vLLM's addition."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Common(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that all generation endpoints share."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    skip_reading_prefix_cache: bool | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    vllm_xargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None


class OpenAi(Common, frozen=True, kw_only=True):
    """What chat and completions share on top."""

    n: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


class ChatRequest(OpenAi, frozen=True, kw_only=True):
    """`/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    tools: list[Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionRequest(OpenAi, frozen=True, kw_only=True):
    """`/v1/completions`. `prompt`: text, token ids, or a list of either."""

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None


class ResponsesRequest(Common, frozen=True, kw_only=True):
    """`/v1/responses`."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[Any] | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    metadata: dict[str, Any] | None = None


class CountTokensRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`/v1/messages/count_tokens`."""

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class MessagesRequest(Common, frozen=True, kw_only=True):
    """`/v1/messages`."""

    messages: list[dict[str, Any]]
    max_tokens: int
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`/tokenize`, with a prompt or with messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`/detokenize`."""

    model: str | None = None
    tokens: list[int]


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`/v1/embeddings`."""

    model: str | None = None
    input: str | list[str | int | list[int]]


def parse(body: bytes, kind: type[T]) -> T:
    """Raises ApiError 400 as vLLM's request schema does."""
    try:
        return msgspec.json.decode(body, type=kind, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"1 validation error:\n  {error}", kind="Bad Request", param="body") from error
