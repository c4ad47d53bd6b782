"""What an answer tells the agent: token counts, and the reply's text as the next turn will repeat it. Pure.

Answers of four APIs, as one JSON document or as a server-sent event stream, recognised by their shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

_DATA: Final = b"data:"
_FINAL: Final = ("response.completed", "response.incomplete")  # carry the whole response; earlier events repeat parts


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """None: the answer does not say."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    reply: str = ""  # text of the only choice; "" when there are several
    extras: bool = False  # it also carries tool calls or reasoning, which templates print in their own way


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None  # chat, completions
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None  # responses, messages
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None  # responses
    cache_read_input_tokens: int | None = None  # messages: not part of input_tokens
    cache_creation_input_tokens: int | None = None


class _Text(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    message: _Text | None = None
    delta: _Text | None = None


class _Block(msgspec.Struct):
    """A content block (messages), or an item of a response's output with its own blocks."""

    type: str = ""
    text: str | None = None
    content: list[_Block] | None = None


class _Delta(msgspec.Struct):
    type: str = ""
    text: str | None = None


class _Body(msgspec.Struct):
    """A response or a message."""

    output: list[_Block] | None = None
    usage: _Usage | None = None


class _Document(msgspec.Struct):
    """The union of all answers and of all stream events: unknown fields are skipped at C speed."""

    type: str = ""
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    output: list[_Block] | None = None  # responses
    content: list[_Block] | None = None  # messages
    response: _Body | None = None  # responses, streamed: the whole at the end
    message: _Body | None = None  # messages, streamed: usage at the start
    content_block: _Block | None = None
    delta: _Delta | str | None = None


_decoder: Final = msgspec.json.Decoder(_Document)


def parse_answer(body: bytes) -> Answer:
    """Never raises: an engine that answers oddly just tells nothing."""
    reader = _Reader()
    for document in _documents(body):
        reader.read(document)
    return reader.answer()


def _documents(body: bytes) -> Iterator[_Document]:
    if body[:1] == b"{":
        lines = [body]
    else:
        lines = [line[len(_DATA) :].strip() for line in body.split(b"\n") if line.startswith(_DATA)]
    for line in lines:
        if line[:1] == b"{":
            try:
                yield _decoder.decode(line)
            except (msgspec.DecodeError, RecursionError):  # not of our shapes; ValidationError is a DecodeError
                continue


class _Reader:
    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._extras = False
        self._choices: set[int] = set()
        self._prompt: int | None = None
        self._cached: int | None = None
        self._output: int | None = None

    def read(self, document: _Document) -> None:
        if document.choices is not None:
            self._read_choices(document.choices)
        elif document.type in _FINAL and document.response:
            self._read_body(document.response)
        elif document.output is not None:
            self._blocks(document.output)
        elif document.content is not None:
            self._blocks(document.content)
        else:
            self._read_message_event(document)
        if document.usage:
            self._count(document.usage)

    def answer(self) -> Answer:
        single = len(self._choices) <= 1
        return Answer(
            prompt_tokens=self._prompt,
            cached_tokens=self._cached,
            output_tokens=self._output,
            reply="".join(self._pieces) if single else "",
            extras=self._extras,
        )

    def _read_choices(self, choices: list[_Choice]) -> None:
        for choice in choices:
            self._choices.add(choice.index)
            text = choice.message or choice.delta
            self._pieces.append(choice.text or (text.content if text else None) or "")
            if text and (text.tool_calls or text.reasoning or text.reasoning_content):
                self._extras = True

    def _read_body(self, body: _Body) -> None:
        self._blocks(body.output or [])
        if body.usage:
            self._count(body.usage)

    def _read_message_event(self, document: _Document) -> None:
        """Anthropic's stream: message_start, content_block_start, content_block_delta, message_delta."""
        if document.message and document.message.usage:
            self._count(document.message.usage)
        if document.type == "content_block_start" and document.content_block:
            self._blocks([document.content_block])
        elif isinstance(document.delta, _Delta) and document.delta.type == "text_delta":
            self._pieces.append(document.delta.text or "")

    def _blocks(self, blocks: list[_Block]) -> None:
        for block in blocks:
            if block.type in ("text", "output_text"):
                self._pieces.append(block.text or "")
            elif block.type == "message":
                self._blocks(block.content or [])
            else:
                self._extras = True

    def _count(self, usage: _Usage) -> None:
        """Later figures win: streams begin with provisional ones."""
        if usage.prompt_tokens is not None:
            self._prompt, self._output = usage.prompt_tokens, usage.completion_tokens
            details = usage.prompt_tokens_details
        elif usage.input_tokens is not None:
            read, created = usage.cache_read_input_tokens, usage.cache_creation_input_tokens or 0
            self._prompt, self._output = usage.input_tokens + (read or 0) + created, usage.output_tokens
            details = usage.input_tokens_details or _Details(read)
        else:
            return
        if details is not None and details.cached_tokens is not None:
            self._cached = details.cached_tokens
