"""A client of a pool or of one engine, and what it gets back: nothing is retried, every answer is kept as it came."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

import aiohttp
import msgspec

from prefixpool import names

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"
ANSWER_S: Final = 60.0
_MESSAGES_TEXT: Final = "content_block_delta"

Body = dict[str, Any]


class Reply(NamedTuple):
    """One whole answer."""

    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def text(self) -> str:
        """What the model wrote."""
        answer = self.json()
        if "output" in answer:
            return str(answer["output"][0]["content"][0]["text"])
        if "content" in answer:
            return str(answer["content"][0]["text"])
        choice = answer["choices"][0]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])

    @property
    def prompt(self) -> int:
        """Prompt tokens, cached ones included, in the engine's own words."""
        usage = self.json()["usage"]
        if "prompt_tokens" in usage:
            return int(usage["prompt_tokens"])
        apart = usage.get("cache_read_input_tokens", 0) + usage.get("cache_creation_input_tokens", 0)
        return int(usage["input_tokens"] + apart)

    @property
    def cached(self) -> int:
        """Cached prompt tokens, in the engine's own words. Raises KeyError where it does not tell."""
        usage = self.json()["usage"]
        if "cache_read_input_tokens" in usage:
            return int(usage["cache_read_input_tokens"])
        details = usage["prompt_tokens_details" if "prompt_tokens" in usage else "input_tokens_details"]
        return int(details["cached_tokens"])

    @property
    def replica(self) -> str:
        return self.headers[names.H_REPLICA]

    @property
    def reason(self) -> str:
        return self.headers[names.H_REASON]

    @property
    def predicted(self) -> int:
        """Cached tokens that the router expected."""
        return int(self.headers[names.H_PREDICTED])

    @property
    def request_id(self) -> str:
        return self.headers[names.H_REQUEST_ID]


class Stream:
    """An answer that is still coming."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.status = answer.status
        self.headers = {name.lower(): value for name, value in answer.headers.items()}
        self.events: list[Any] = []  # decoded data of each event so far
        self.done = False  # ended as a whole answer ends: [DONE], or Anthropic's message_stop
        self.cut = False  # the connection broke
        self._answer = answer

    @property
    def replica(self) -> str:
        return self.headers[names.H_REPLICA]

    @property
    def errors(self) -> list[Any]:
        """Error events."""
        return [event for event in self.events if isinstance(event, dict) and "error" in event]

    @property
    def text(self) -> str:
        """What a chat, completion or messages stream has written so far."""
        choices = [choice for event in self.events for choice in event.get("choices", ())]
        written = [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]
        return "".join(written + [event["delta"]["text"] for event in self.events if event.get("type") == _MESSAGES_TEXT])

    async def begin(self) -> None:
        """Until the first event with output in it."""
        async for _ in self._read():
            if self.text:
                return

    async def rest(self) -> None:
        """Until it ends, however it does."""
        async for _ in self._read():
            pass

    async def _read(self) -> AsyncIterator[None]:
        try:
            async for line in self._answer.content:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    self.done = True
                    continue
                self.events.append(msgspec.json.decode(data))
                self.done = self.done or self.events[-1].get("type") == "message_stop"
                yield
        except aiohttp.ClientPayloadError:
            self.cut = True


class PoolClient:
    """Speaks to `url` with one key. Owns no session."""

    def __init__(self, http: aiohttp.ClientSession, url: str, key: str, model: str) -> None:
        self._http = http
        self._key = key
        self._model = model
        self.url = url

    async def post(self, path: str, body: Body | bytes, **headers: str) -> Reply:
        """`body`: an object, to which the model is added, or raw bytes. Header names with `_` for `-`."""
        async with self._http.post(
            self.url + path, data=self._raw(body), headers=self._headers(headers), timeout=_timeout()
        ) as answer:
            return Reply(answer.status, {k.lower(): v for k, v in answer.headers.items()}, await answer.read())

    async def get(self, path: str, **headers: str) -> Reply:
        async with self._http.get(self.url + path, headers=self._headers(headers), timeout=_timeout()) as answer:
            return Reply(answer.status, {k.lower(): v for k, v in answer.headers.items()}, await answer.read())

    async def delete(self, path: str) -> Reply:
        async with self._http.delete(self.url + path, headers=self._headers({}), timeout=_timeout()) as answer:
            return Reply(answer.status, {k.lower(): v for k, v in answer.headers.items()}, await answer.read())

    async def chat(self, *said: str | Body, **options: Any) -> Reply:
        """A greedy chat of 4 tokens unless `options` say otherwise. Strings are user messages. Raises AssertionError."""
        reply = await self.post(CHAT, chat(*said, **options))
        assert reply.status == 200, reply.body[:300]
        return reply

    @asynccontextmanager
    async def stream(self, path: str, body: Body, **headers: str) -> AsyncIterator[Stream]:
        """Left early, it is aborted."""
        raw, fields = self._raw({**body, "stream": True}), self._headers(headers)
        async with self._http.post(self.url + path, data=raw, headers=fields, timeout=_timeout()) as answer:
            yield Stream(answer)

    def _raw(self, body: Body | bytes) -> bytes:
        return body if isinstance(body, bytes) else msgspec.json.encode({"model": self._model, **body})

    def _headers(self, more: dict[str, str]) -> dict[str, str]:
        own = {"content-type": "application/json"} | ({"authorization": f"Bearer {self._key}"} if self._key else {})
        return own | {name.replace("_", "-"): value for name, value in more.items()}


def chat(*said: str | Body, **options: Any) -> Body:
    """Body of a greedy chat. Strings are user messages."""
    messages = [{"role": "user", "content": one} if isinstance(one, str) else one for one in said]
    return {"messages": messages, "max_tokens": 4, "temperature": 0, **options}


def system(text: str) -> Body:
    """A system message."""
    return {"role": "system", "content": text}


def _timeout() -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=ANSWER_S)
