"""Token counts out of answers, streamed or not, without parsing what does not carry any. Pure.

Streams are cut into server-sent events only as far as needed: a chunk that ends with an event and has no `"usage"` in it
goes through untouched and unread. (Inside JSON text a quote is escaped, so `"usage"` can't come from what the model wrote.)
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import msgspec

_MARK: Final = b'"usage"'
_TOLD: Final = re.compile(rb'"usage"\s*:\s*\{')  # some engines say `"usage":null` in every chunk
_END_OF_EVENT: Final = re.compile(rb"\r?\n\r?\n")
_END_MOST: Final = 3  # bytes of it that may have come already
_DATA: Final = re.compile(rb"^data:", re.MULTILINE)
_HAS_CHOICE: Final = re.compile(rb'"choices"\s*:\s*\[\s*[^\]\s]')
_MAX_EVENT_BYTES: Final = 1 << 18  # an unfinished event beyond this is passed on unjudged
_MOST_TOKENS: Final = 1 << 48  # no prompt has as many: metrics add these figures up


class Usage(NamedTuple):
    """None: not told. `prompt` counts cached tokens too, whatever the API's own figures mean."""

    prompt: int | None = None
    cached: int | None = None
    output: int | None = None


UNKNOWN: Final = Usage()


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Figures(msgspec.Struct):
    # Chat and completions
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    # Responses and messages
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    # Messages: input_tokens excludes these two
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Wrapped(msgspec.Struct):
    usage: _Figures | None = None


class _Answer(msgspec.Struct):
    """An answer, or one event: a Responses stream tells usage inside `response`. The `message` of Anthropic's
    `message_start` is left out on purpose: its input_tokens don't know of the cache yet (research: vllm.md 6)."""

    usage: _Figures | None = None
    response: _Wrapped | None = None
    choices: list[msgspec.Raw] | None = None


_DECODER: Final = msgspec.json.Decoder(_Answer)


def usage_of_answer(body: bytes) -> Usage:
    """Of a whole JSON answer of any API; UNKNOWN if it has none or is no JSON."""
    if _MARK not in body:
        return UNKNOWN
    answer = _decode(body)
    return UNKNOWN if answer is None else _usage(answer)


def _decode(body: bytes) -> _Answer | None:
    try:
        return _DECODER.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return None


def _usage(answer: _Answer) -> Usage:
    figures = answer.usage or (answer.response.usage if answer.response is not None else None)
    if figures is None:
        return UNKNOWN
    if figures.prompt_tokens is not None:
        return _credible(figures.prompt_tokens, _cached(figures.prompt_tokens_details), figures.completion_tokens)
    read, created = figures.cache_read_input_tokens, figures.cache_creation_input_tokens
    if figures.input_tokens is None:
        return _credible(None, None, figures.output_tokens)
    cached = read if read is not None else _cached(figures.input_tokens_details)
    return _credible(figures.input_tokens + (read or 0) + (created or 0), cached, figures.output_tokens)


def _credible(*counts: int | None) -> Usage:
    """What an engine says is no reason to believe in fewer tokens than none."""
    return Usage(*(count if count is not None and 0 <= count <= _MOST_TOKENS else None for count in counts))


def _cached(details: _Details | None) -> int | None:
    return None if details is None else details.cached_tokens


class StreamMeter:
    """Follows one event stream: reads its usage, and withholds the usage chunk that the client did not ask for.

    `feed` takes bytes as they come, cut anywhere, and returns what the client gets now. The only bytes ever held back are
    the head of an unfinished event that may still turn out to be that chunk.
    """

    def __init__(self, *, withhold: bool) -> None:
        self._withhold = withhold
        self._event = b""  # the unfinished event so far
        self._sent = 0  # how much of it the client has
        self._last = b""  # the last event that told usage

    def feed(self, chunk: bytes) -> bytes:
        if not self._event and chunk.endswith(b"\n\n") and _MARK not in chunk:
            return chunk
        return self._cut(chunk)

    def end(self) -> bytes:
        """The stream is over: what was held back, if it was not the usage chunk."""
        event, sent, self._event, self._sent = self._event, self._sent, b"", 0
        return b"" if self._is_withheld(event, sent) else event[sent:]

    @property
    def mid_event(self) -> bool:
        """The client has a part of an event whose end has not come."""
        return self._sent > 0

    @property
    def usage(self) -> Usage:
        """As of the last event that told any."""
        answer = _decode(_event_data(self._last)) if self._last else None
        return UNKNOWN if answer is None else _usage(answer)

    def _cut(self, chunk: bytes) -> bytes:
        data = self._event + chunk
        sent, start, out = self._sent, 0, []
        for found in _END_OF_EVENT.finditer(data, max(0, len(self._event) - _END_MOST)):  # before it there is no end
            event = data[start : found.end()]
            if not self._is_withheld(event, sent):
                out.append(event[sent:])
            start, sent = found.end(), 0
        rest = data[start:]
        if rest and not self._undecided(rest, sent):
            out.append(rest[sent:])
            sent = len(rest)
        self._event, self._sent = (rest, sent) if len(rest) <= _MAX_EVENT_BYTES else (b"", 0)
        return b"".join(out)

    def _undecided(self, rest: bytes, sent: int) -> bool:
        """Nothing of this unfinished event may go out yet."""
        return self._withhold and sent == 0 and len(rest) <= _MAX_EVENT_BYTES and not _HAS_CHOICE.search(rest)

    def _is_withheld(self, event: bytes, sent: int) -> bool:
        if not _TOLD.search(event):
            return False
        if not self._withhold or sent:
            self._last = event
            return False
        answer = _decode(_event_data(event))
        if answer is None or answer.usage is None:
            return False
        self._last = event
        return answer.choices == []


def _event_data(event: bytes) -> bytes:
    """The JSON of an event whose data is on one line, which is how all engines write it."""
    found = _DATA.search(event)
    return event[found.end() :].strip() if found is not None else b""
