"""A streaming chat client that measures what a user would see."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any, Final, NamedTuple

import aiohttp
import msgspec

from prefixpool import names

REQUEST_S: Final = 180.0  # a CPU with a long queue is slow, not broken
CHAT: Final = "/v1/chat/completions"
TOLD: Final = (names.H_REQUEST_ID, names.H_REPLICA, names.H_REASON, names.H_PREDICTED)  # headers that answers are kept with


class RequestFailedError(Exception):
    """One request was not answered in full; the message says how, without any prompt text."""


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta = _Delta()
    finish_reason: str | None = None


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: Any = None


class Answer(NamedTuple):
    """A complete answer. Times are of time.monotonic()."""

    text: str
    first_s: float
    ended_s: float
    finish: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    headers: dict[str, str]


_chunk = msgspec.json.Decoder(_Chunk)


class ChatClient:
    """Talks to a router, or with `key` to an engine itself. Owns no session."""

    def __init__(self, http: aiohttp.ClientSession, url: str, model: str, key: str = "") -> None:
        self._http = http
        self._url = url
        self._model = model
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})

    async def ask(self, messages: list[dict[str, Any]], max_tokens: int) -> Answer:
        """Greedy, streamed. Raises RequestFailedError."""
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with self._http.post(
                self._url + CHAT,
                data=msgspec.json.encode(body),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=REQUEST_S),
            ) as response:
                if response.status != 200:
                    raise RequestFailedError(f"status {response.status}: {(await response.text())[:300]}")
                return await _collect(response)
        except TimeoutError as error:
            raise RequestFailedError(f"no complete answer within {REQUEST_S:.0f} s") from error
        except aiohttp.ClientError as error:
            raise RequestFailedError(f"{type(error).__name__}: {error}") from error

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """A JSON document for another. Raises RequestFailedError."""
        try:
            async with self._http.post(
                self._url + path,
                data=msgspec.json.encode({"model": self._model, **body}),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=REQUEST_S),
            ) as response:
                raw = await response.read()
                if response.status != 200:
                    raise RequestFailedError(f"{path}: status {response.status}: {raw[:300].decode(errors='replace')}")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RequestFailedError(f"{path}: {type(error).__name__}: {error}") from error
        return msgspec.json.decode(raw) if raw else None


async def _collect(response: aiohttp.ClientResponse) -> Answer:
    text, finish, first_s = [], "", 0.0
    usage: _Usage | None = None
    done = False
    async for data in _events(response):
        if data == b"[DONE]":
            done = True
            break
        chunk = _decode(data)
        usage = chunk.usage or usage
        for choice in chunk.choices:
            if choice.delta.content:
                first_s = first_s or time.monotonic()
                text.append(choice.delta.content)
            finish = choice.finish_reason or finish
    ended_s = time.monotonic()
    if not done or usage is None or not finish:
        raise RequestFailedError(
            f"the stream ended early: [DONE] {done}, usage {usage is not None}, finish {finish or 'none'}"
        )
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None
    headers = {name: response.headers.get(name, "") for name in TOLD}
    return Answer(
        "".join(text),
        first_s or ended_s,
        ended_s,
        finish,
        usage.prompt_tokens,
        cached or 0,
        usage.completion_tokens,
        headers,
    )


def _decode(data: bytes) -> _Chunk:
    try:
        chunk = _chunk.decode(data)
    except msgspec.DecodeError as error:
        raise RequestFailedError(f"a chunk that is not what OpenAI's API sends: {error}") from error
    if chunk.error:
        raise RequestFailedError(f"error event in the stream: {str(chunk.error)[:300]}")
    return chunk


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async for line in response.content:
        if line.startswith(b"data:"):
            yield line[5:].strip()
