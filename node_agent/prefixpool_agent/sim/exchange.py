"""One HTTP exchange with the engine behind it: body in, whole answer or stream out, abort when the client goes away."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

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
        send = _identified(request, send)
        try:
            call = Call(await request.body(), request.headers, request.query_params, scope["path"])
        except ClientDisconnect:
            return
        try:
            answer = self._handle(call)
        except ApiError as error:
            await _send_whole(send, error.status, _JSON, error.anthropic() if self._anthropic else error.openai())
            return
        await self._answer(answer, receive, send)

    async def _answer(self, answer: Answer, receive: Receive, send: Send) -> None:
        """To the end, or until the client goes away: then nothing more is written, and the engine stops working on it."""
        writing = asyncio.create_task(_send_stream(send, answer) if answer.stream else _send_document(send, answer))
        watching = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait((writing, watching), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            self._abort(answer)
            writing.cancel()
            watching.cancel()
            await asyncio.gather(writing, watching, return_exceptions=True)

    def _abort(self, answer: Answer) -> None:
        if answer.generation is not None:
            self._engine.abort(answer.generation)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _identified(request: Request, send: Send) -> Send:
    """Answers carry the client's request id, or a new one (vLLM's `--enable-request-id-headers`)."""
    id_ = request.headers.get("x-request-id") or secrets.token_hex(16)

    async def send_identified(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"].append((b"x-request-id", id_.encode("latin-1")))
        await send(message)

    return send_identified


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
