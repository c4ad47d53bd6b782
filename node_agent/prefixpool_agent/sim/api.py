"""The sim's ASGI application: vLLM's paths on top of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from prefixpool_agent.sim.chat import Chat
from prefixpool_agent.sim.completions import Completions
from prefixpool_agent.sim.exchange import Answer, Call, Endpoint
from prefixpool_agent.sim.messages import Messages
from prefixpool_agent.sim.models import Plain
from prefixpool_agent.sim.responses import Responses
from prefixpool_agent.sim.serving import Serving

Handler = Callable[[Call], Answer]


def build_app(serving: Serving, *, dev_mode: bool = True) -> Starlette:
    """The engine runs for as long as the application's lifespan. `dev_mode`: with `/reset_prefix_cache`."""
    engine = serving.engine

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        engine.open()
        loop = asyncio.create_task(engine.run())
        try:
            yield
        finally:
            loop.cancel()
            with suppress(asyncio.CancelledError):
                await loop
            await engine.shut()

    return Starlette(
        routes=_routes(serving, dev_mode=dev_mode), lifespan=lifespan, exception_handlers={HTTPException: _detail}
    )


def _routes(serving: Serving, *, dev_mode: bool) -> list[Route]:
    plain, messages, responses = Plain(serving), Messages(serving), Responses(serving)

    def post(path: str, handler: Handler, *, anthropic: bool = False) -> Route:
        return Route(path, Endpoint(serving.engine, handler, anthropic=anthropic), methods=["POST"])

    def get(path: str, handler: Handler) -> Route:
        return Route(path, Endpoint(serving.engine, handler), methods=["GET"])

    return [
        post("/v1/chat/completions", Chat(serving).handle),
        post("/v1/completions", Completions(serving).handle),
        post("/v1/responses", responses.handle),
        get("/v1/responses/{response_id}", responses.retrieve),
        post("/v1/messages", messages.handle, anthropic=True),
        post("/v1/messages/count_tokens", messages.count_tokens, anthropic=True),
        post("/v1/embeddings", plain.embeddings),
        get("/v1/models", plain.models),
        post("/tokenize", plain.tokenize),
        post("/detokenize", plain.detokenize),
        get("/health", plain.health),
        get("/ping", plain.health),
        post("/ping", plain.health),
        get("/version", plain.version),
        get("/load", plain.load),
        get("/metrics", plain.metrics),
        get("/kv_event_sources", plain.kv_event_sources),
        *([post("/reset_prefix_cache", plain.reset_prefix_cache)] if dev_mode else []),
    ]


async def _detail(_: Request, error: Exception) -> JSONResponse:
    """Unknown paths and methods, as FastAPI words them."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = error.detail if isinstance(error, HTTPException) else "Internal Server Error"
    return JSONResponse({"detail": detail}, status_code=status)
