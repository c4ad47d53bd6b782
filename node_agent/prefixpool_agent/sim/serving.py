"""What all generation endpoints do alike: model names, prompts to tokens, limits, scope, usage."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from prefixpool_agent.sim.engine import Ask, Engine, Generation
from prefixpool_agent.sim.exchange import ApiError, Call
from prefixpool_agent.sim.requests import Common, OpenAi
from prefixpool_agent.sim.sequence import Limits, Scope
from prefixpool_agent.sim.template import ChatTemplate, NotTextError, TemplateError
from prefixpool_agent.sim.tokenizer import MAX_CHARS_PER_TOKEN, SimTokenizer, token_bytes

MAX_SALT_CHARS: Final = 1024
# To one request. vLLM's own bound is 16384, for each prompt; here one process does everything, and a request that keeps it
# busy for seconds makes the engine look dead.
MAX_REPLIES: Final = 1024
MAX_LOGPROBS: Final = 20  # vLLM's --max-logprobs, by default
FINGERPRINT: Final = "sim"


class Models(NamedTuple):
    """`served`: names of the one model; the first is shown in answers. `adapters` count as models of their own."""

    path: str
    served: tuple[str, ...]
    adapters: tuple[str, ...] = ()


class Serving:
    """Turns parsed requests into work for the engine. Raises ApiError with vLLM's words."""

    def __init__(self, engine: Engine, tokenizer: SimTokenizer, template: ChatTemplate, models: Models) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.template = template
        self.models = models
        self.max_model_len = engine.scheduler.config.max_model_len

    def check_model(self, name: str | None) -> str:
        """The name that answers carry: the first served one, or the adapter's."""
        if name in self.models.adapters:
            return str(name)
        if name and name not in self.models.served:
            valid = f" Valid aliases: {', '.join(self.models.served)}." if len(self.models.served) > 1 else ""
            raise ApiError(404, f"The model `{name}` does not exist.{valid}", kind="NotFoundError", param="model")
        return self.models.served[0]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Tokens of a conversation."""
        if not messages:
            raise ApiError(400, "Cannot apply chat template to an empty conversation. Provide at least one message.")
        try:
            text = self.template.render(
                messages,
                tools or (),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
        except NotTextError as error:
            raise ApiError(400, f"{self.models.served[0]} is not a multimodal model") from error
        except TemplateError as error:
            raise ApiError(400, str(error)) from error
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        """Refuses what cannot fit before it spends time on it, as vLLM does."""
        longest, most = self.max_model_len, self.max_model_len * MAX_CHARS_PER_TOKEN
        if len(text) > most:
            raise ApiError(
                400,
                f"This model's maximum context length is {longest} tokens. However, your prompt contains {len(text)} "
                f"characters (more than {most} characters, which is the upper bound for {longest} input tokens). "
                f"Please reduce the length of the input prompt. (parameter=input_text, value={len(text)})",
                param="input_text",
            )
        return self.tokenizer.encode(text)

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Ids that a client sent must be ids of this vocabulary."""
        for token in tokens:
            try:
                token_bytes(token)
            except KeyError as error:
                raise ApiError(400, f"Token id {token} is out of vocabulary") from error

    def ask(
        self,
        prompt: list[int],
        request: Common,
        call: Call,
        *,
        max_tokens: int | None,
        stop: str | list[str] | None = None,
        replies: int = 1,
    ) -> Ask:
        """Checks everything that can be refused; `engine.submit` takes the result."""
        if not prompt:
            raise ApiError(400, "The decoder prompt cannot be empty")
        room = self._room(prompt)
        most = room if max_tokens is None else min(max_tokens, room)
        _check_limits(request, most, replies)
        limits = Limits(
            max_tokens=most,
            min_tokens=request.min_tokens or 0,
            ignore_eos=bool(request.ignore_eos),
            stop_tokens=frozenset(request.stop_token_ids or ()),
        )
        stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        seed = request.seed if request.temperature != 0 else None
        return Ask(prompt, limits, self._scope(request, call), tuple(filter(None, stops)), replies, seed)

    def _room(self, prompt: list[int]) -> int:
        """Tokens that a reply may have; 0 for a prompt that just fits, which vLLM refuses as `max_tokens` of 0."""
        if len(prompt) <= self.max_model_len:
            return self.max_model_len - len(prompt)
        raise ApiError(
            400,
            f"This model's maximum context length is {self.max_model_len} tokens. However, your prompt contains at least "
            f"{self.max_model_len + 1} input tokens, which exceeds this limit even without any output tokens. "
            f"Please reduce the length of the input prompt. (parameter=input_tokens, value={self.max_model_len + 1})",
            param="input_tokens",
        )

    def _scope(self, request: Common, call: Call) -> Scope:
        salt, extra = request.cache_salt, request.vllm_xargs or {}
        if salt is not None and not 0 < len(salt) <= MAX_SALT_CHARS:
            raise ApiError(400, f"Parameter 'cache_salt' must be a non-empty string of at most {MAX_SALT_CHARS} characters")
        most, tiers = _loading(request.kv_transfer_params or {})
        label = request.session_id or call.headers.get("x-session-id") or extra.get("session_id") or None
        return Scope(
            salt=salt or "",
            adapter=str(request.model) if request.model in self.models.adapters else "",
            label=label if isinstance(label, str) else None,
            report_full=extra.get("kv_cache_report_mode") == "full",
            skip_cache=request.prompt_logprobs is not None or bool(request.skip_reading_prefix_cache),
            most_loaded_tokens=most,
            reads_disk=tiers is None or "STORAGE" in tiers,
        )


def _loading(params: Mapping[str, Any]) -> tuple[int | None, list[str] | None]:
    """How many tokens may be loaded, and from which media; None: all. As in vLLM, what makes no sense says nothing."""
    most, tiers = params.get("max_load_tokens"), params.get("kv_load_tiers")
    named = (
        [str(each.get("medium")).upper() for each in tiers if isinstance(each, dict)] if isinstance(tiers, list) else None
    )
    return (most if type(most) is int and most >= 0 else None), named


def _check_limits(request: Common, max_tokens: int, replies: int) -> None:
    if max_tokens < 1:
        raise ApiError(
            400,
            f"max_tokens must be at least 1, got {max_tokens}. (parameter=max_tokens, value={max_tokens})",
            param="max_tokens",
        )
    if replies < 1:
        raise ApiError(400, f"n must be at least 1, got {replies}. (parameter=n, value={replies})", param="n")
    if replies > 1 and request.temperature == 0:
        raise ApiError(400, f"n must be 1 when using greedy sampling, got {replies}.")
    least = request.min_tokens or 0
    if not 0 <= least <= max_tokens:
        raise ApiError(400, f"min_tokens must be between 0 and max_tokens={max_tokens}, got {least}.")


def check_replies(request: OpenAi, prompts: int = 1) -> int:
    """How many each of the prompts gets. Raises ApiError 400 for more than one engine should begin at once."""
    replies = 1 if request.n is None else request.n
    if replies > MAX_REPLIES:
        raise ApiError(400, f"n must be at most {MAX_REPLIES}, got {replies}.", param="n")
    if replies * prompts > MAX_REPLIES:
        raise ApiError(400, f"{prompts} prompts with n={replies} are more than {MAX_REPLIES} replies.", param="prompt")
    return replies


def check_logprobs(top: int | None) -> None:
    """Raises ApiError 400, in vLLM's words, for more of the best tokens than it tells by default (-1: all of them)."""
    if top is not None and top < -1:
        raise ApiError(400, f"logprobs must be non-negative or -1, got {top}.", param="logprobs")
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        words = f"Requested sample logprobs of {top}, which is greater than max allowed: {MAX_LOGPROBS}"
        raise ApiError(400, words, param="logprobs")


def answer_id(prefix: str, call: Call) -> str:
    """The client's request id, or a new one, behind the prefix of its API."""
    return prefix + (call.headers.get("x-request-id") or secrets.token_hex(8))


def created_cache_tokens(generation: Generation, block_tokens: int) -> int:
    """Prompt tokens that this request added to the cache: full blocks only."""
    return max(0, generation.prompt_tokens // block_tokens * block_tokens - generation.cached_tokens)


class UsageOptions(NamedTuple):
    """What a stream tells of usage, and when."""

    final: bool
    continuous: bool

    @classmethod
    def of(cls, request: OpenAi) -> UsageOptions:
        options = request.stream_options
        final = bool(options and options.include_usage)
        return cls(final, final and bool(options and options.continuous_usage_stats))


def plain_usage(prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    """Usage without details, as in the chunks of a stream."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "completion_tokens": output_tokens,
    }
