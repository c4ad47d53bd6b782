"""One answer on its way to the client: passed on at once, remembered for the note that tells the agent how it ended."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from prefixpool import note

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# Events that a stream may send before the first token. vLLM sends each event as a chunk of its own.
_PREAMBLES: Final = (
    b'"delta":{"role"',
    b"event: message_start",
    b"event: content_block_start",
    b"event: ping",
    b"event: response.created",
    b"event: response.in_progress",
    b"event: response.output_item.added",
    b"event: response.content_part.added",
    b": keep-alive",
)
_PREAMBLE_BYTES: Final = 400


class ReplyBudget:
    """Bytes of answers held for notes by all requests of this process; beyond it answers are noted without body."""

    def __init__(self, max_bytes: int = 128 << 20) -> None:
        self._left = max_bytes

    def take(self, size: int) -> bool:
        """False: not granted."""
        if size > self._left:
            return False
        self._left -= size
        return True

    def give(self, size: int) -> None:
        """Give granted bytes back."""
        self._left += size


class Reply:
    """Wraps `receive` and `send` of one request."""

    def __init__(
        self, label: str, receive: Receive, send: Send, budget: ReplyBudget, *, body: bytes | None, keep: bool
    ) -> None:
        """`body`: already read, to be handed to the application first. `keep=False`: do not remember the answer."""
        self.label = label
        self._receive = receive
        self._send = send
        self._budget = budget
        self._body = body
        self._parts: list[bytes] = []
        self._held = 0
        self.status = 0
        self.first_s = 0.0
        self.complete = False
        self.disconnected = False
        self.cut = not keep

    async def receive(self) -> Message:
        """What the application reads."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.client_left()
        return message

    def client_left(self) -> None:
        """What is written from now on reaches nobody, and is no answer: vLLM writes `null` with status 200 then."""
        self.disconnected = self.disconnected or not self.complete

    async def send(self, message: Message) -> None:
        """What the application writes."""
        if not self.disconnected:
            self._follow(message)
        await self._send(message)

    def _follow(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            chunk = message.get("body", b"")
            if chunk:
                self._remember(chunk)
            self.complete = not message.get("more_body", False)

    def end(self) -> note.End:
        """The note about it; frees what was held."""
        body = b"".join(self._parts)
        self._forget()
        return note.End(
            id=self.label,
            first_s=self.first_s,
            at_s=time.monotonic(),
            status=self.status,
            body=body,
            cut=self.cut,
            aborted=self.disconnected,
        )

    def _remember(self, chunk: bytes) -> None:
        if not self.first_s and not any(sign in chunk[:_PREAMBLE_BYTES] for sign in _PREAMBLES):
            self.first_s = time.monotonic()
        if self.cut:
            return
        if self._held + len(chunk) > note.MAX_BODY_BYTES or not self._budget.take(len(chunk)):
            self.cut = True
            self._forget()
            return
        self._held += len(chunk)
        self._parts.append(bytes(chunk))

    def _forget(self) -> None:
        self._budget.give(self._held)
        self._held = 0
        self._parts.clear()
