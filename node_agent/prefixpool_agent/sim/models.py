"""The small endpoints: models, tokens, embeddings, health, load, cache reset, metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from prefixpool import __version__
from prefixpool_agent.sim.exchange import Answer, ApiError, Call, document, text
from prefixpool_agent.sim.requests import DetokenizeRequest, EmbeddingRequest, TokenizeRequest, parse
from prefixpool_agent.sim.serving import Serving
from prefixpool_agent.sim.tokenizer import token_bytes

VERSION: Final = f"{__version__}+sim"
_DIMENSIONS: Final = 64


class Plain:
    """One instance serves all requests."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._started = int(time.time())

    def models(self, _: Call) -> Answer:
        models = self._serving.models
        cards = [self._card(name, models.path, None) for name in models.served]
        cards += [self._card(name, name, models.served[0]) for name in models.adapters]
        return document({"object": "list", "data": cards})

    def tokenize(self, call: Call) -> Answer:
        request = parse(call.body, TokenizeRequest)
        serving = self._serving
        serving.check_model(request.model)
        if request.messages is not None:
            tokens = serving.render(request.messages, request.tools, add_generation_prompt=request.add_generation_prompt)
        elif request.prompt is not None:
            tokens = serving.encode(request.prompt)
        else:
            raise ApiError(400, "prompt or messages is required", kind="Bad Request", param="body")
        shown = [token_bytes(token).decode("utf-8", "replace") for token in tokens] if request.return_token_strs else None
        return document(
            {"count": len(tokens), "max_model_len": serving.max_model_len, "tokens": tokens, "token_strs": shown}
        )

    def detokenize(self, call: Call) -> Answer:
        request = parse(call.body, DetokenizeRequest)
        self._serving.check_model(request.model)
        self._serving.check_tokens(request.tokens)
        return document({"prompt": self._serving.tokenizer.decode(request.tokens, skip_special=False)})

    def embeddings(self, call: Call) -> Answer:
        """A vLLM that generates has no such path; this one has, so that the pool's own can be tested."""
        request = parse(call.body, EmbeddingRequest)
        model = self._serving.check_model(request.model)
        inputs = self._inputs(request)
        data = [{"index": i, "object": "embedding", "embedding": _embed(tokens)} for i, tokens in enumerate(inputs)]
        count = sum(map(len, inputs))
        usage = {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0, "prompt_tokens_details": None}
        return document({"object": "list", "created": int(time.time()), "model": model, "data": data, "usage": usage})

    def health(self, _: Call) -> Answer:
        if self._serving.engine.failed.is_set():
            raise ApiError(503, "the engine has failed", kind="Service Unavailable")
        return text(b"", b"text/plain; charset=utf-8")

    def version(self, _: Call) -> Answer:
        return document({"version": VERSION})

    def load(self, _: Call) -> Answer:
        return document({"server_load": 0})  # as vLLM without --enable-server-load-tracking

    def kv_event_sources(self, _: Call) -> Answer:
        source = self._serving.engine.publisher.describe()
        return document({} if source is None else {"0": source})

    def reset_prefix_cache(self, call: Call) -> Answer:
        external = _flag(call.query, "reset_external")
        return document({"success": self._serving.engine.scheduler.reset(external_tiers=external)})

    def metrics(self, _: Call) -> Answer:
        engine = self._serving.engine
        engine.observe_gauges()
        return text(generate_latest(engine.metrics.registry), CONTENT_TYPE_LATEST.encode())

    def _inputs(self, request: EmbeddingRequest) -> list[list[int]]:
        given = request.input
        if isinstance(given, str):
            return [self._serving.encode(given)]
        if all(isinstance(part, int) for part in given):
            given = [[part for part in given if isinstance(part, int)]]
        return [self._serving.encode(part) if isinstance(part, str) else self._tokens(part) for part in given]

    def _tokens(self, part: int | list[int]) -> list[int]:
        tokens = [part] if isinstance(part, int) else part
        self._serving.check_tokens(tokens)
        return tokens

    def _card(self, name: str, root: str, parent: str | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "vllm",
            "root": root,
            "parent": parent,
            "max_model_len": self._serving.max_model_len,
            "permission": [],
        }


def _embed(tokens: list[int]) -> list[float]:
    digest = blake2b(repr(tokens).encode(), digest_size=_DIMENSIONS).digest()
    scale = sum((byte - 127.5) ** 2 for byte in digest) ** 0.5
    return [(byte - 127.5) / scale for byte in digest]


def _flag(query: Mapping[str, str], name: str) -> bool:
    return query.get(name, "").lower() in ("1", "true", "yes", "on")
