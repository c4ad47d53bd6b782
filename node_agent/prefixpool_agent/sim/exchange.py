"""One HTTP exchange with the engine behind it: body in, whole answer or stream out, abort when the client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from prefixpool_agent.sim.engine import Engine, Generation

_STREAM = ((b"content-type", b"text/event-stream; charset=utf-8"),)
_JSON = b"application/json"
DONE = b"data: [DONE]\n\n"


class ApiError(Exception):
    """An answer in the shape of vLLM's errors: `type` is a class name of its own, `code` the HTTP status."""

    def __init__(self, status: int, message: str, *, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param

    def openai(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": error})

    def anthropic(self) -> bytes:
        if self.kind == "Bad Request":  # refused by the request's schema, before vLLM's Anthropic layer sees it
            return self.openai()
        return msgspec.json.encode({"type": "error", "error": {"type": self.kind, "message": self.message}})


class Call(NamedTuple):
    """A request as endpoints see it."""

    body: bytes
    headers: Mapping[str, str]
    query: Mapping[str, str]
    path: str = ""


class Answer(NamedTuple):
    """`chunks` yields the parts of a stream, or exactly one document."""

    chunks: AsyncIterator[bytes]
    stream: bool = False
    generation: Generation | None = None
    content_type: bytes = _JSON


def document(value: Any) -> Answer:
    """A JSON answer that needs no generation."""
    return text(msgspec.json.encode(value), _JSON)


def event(chunk: dict[str, Any]) -> bytes:
    """One server-sent event of OpenAI's APIs."""
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def text(body: bytes, content_type: bytes) -> Answer:
    async def once() -> AsyncIterator[bytes]:
        yield body

    return Answer(once(), content_type=content_type)


class Endpoint:
    """An ASGI application for one route; `handle` parses, submits and returns without waiting."""

    def __init__(self, engine: Engine, handle: Callable[[Call], Answer], *, anthropic: bool = False) -> None:
        self._engine = engine
        self._handle = handle
        self._anthropic = anthropic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            call = Call(await request.body(), request.headers, request.query_params, scope["path"])
        except ClientDisconnect:
            return
        try:
            answer = self._handle(call)
        except ApiError as error:
            await _send_whole(send, error.status, _JSON, error.anthropic() if self._anthropic else error.openai())
            return
        watcher = asyncio.create_task(self._abort_on_disconnect(receive, answer))
        try:
            await (_send_stream(send, answer) if answer.stream else _send_document(send, answer))
        finally:
            watcher.cancel()
            self._abort(answer)
            await asyncio.gather(watcher, return_exceptions=True)

    async def _abort_on_disconnect(self, receive: Receive, answer: Answer) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._abort(answer)

    def _abort(self, answer: Answer) -> None:
        if answer.generation is not None:
            self._engine.abort(answer.generation)


async def _send_document(send: Send, answer: Answer) -> None:
    body = b"".join([chunk async for chunk in answer.chunks])
    await _send_whole(send, 200, answer.content_type, body)


async def _send_whole(send: Send, status: int, content_type: bytes, body: bytes) -> None:
    headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _send_stream(send: Send, answer: Answer) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": list(_STREAM)})
    async for chunk in answer.chunks:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
