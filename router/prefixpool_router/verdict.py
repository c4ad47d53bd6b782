"""Whether an engine's answer is none, so that another replica may be asked (research: vllm.md 6). Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from typing import Any, Final

import msgspec

from prefixpool_router.paths import Api

_DONE: Final = b"[DONE]"
_SHUT_DOWN: Final = b"cannot schedule new futures after shutdown"
_SUSPECT: Final = re.compile(rb'"completion_tokens"\s*:\s*0\b|"finish_reason"\s*:\s*"abort"')
_COUNTED: Final = frozenset({Api.CHAT, Api.COMPLETIONS})


class Opening(Enum):
    """What the first bytes of an event stream say."""

    OUTPUT = "output"  # the engine works on it
    NOTHING = "nothing"  # it ended, or was aborted, before the first token
    UNDECIDED = "undecided"  # only a role so far, which engines send together with what follows


class _Message(msgspec.Struct):
    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None

    @property
    def empty(self) -> bool:
        return not (self.content or self.reasoning or self.reasoning_content or self.tool_calls)


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    text: str | None = None
    delta: _Message | None = None

    @property
    def empty(self) -> bool:
        return not self.text and (self.delta is None or self.delta.empty) and self.finish_reason in (None, "abort")


class _Tokens(msgspec.Struct):
    completion_tokens: int | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Tokens | None = None
    error: Any = None


_DECODER: Final = msgspec.json.Decoder(_Answer)


def refuses_work(status: int, body: bytes) -> bool:
    """An engine on its way down, or one without room. Any 503 counts: engines send it before they begin."""
    return status == 503 or (status == 500 and _SHUT_DOWN in body)


def is_cut_short(api: Api, body: bytes) -> bool:
    """A whole 200 answer of a shutting-down engine: a choice was aborted, or no token was made and nobody says why."""
    if api not in _COUNTED or not _SUSPECT.search(body):
        return False
    answer = _decode(body)
    if answer is None:
        return False
    reasons = {choice.finish_reason for choice in answer.choices or ()}
    nothing = answer.usage is not None and answer.usage.completion_tokens == 0
    return "abort" in reasons or (nothing and reasons <= {None})


def opening(api: Api, data: bytes) -> Opening:
    """Judge the first chunks of an event stream; what can't be read is taken for output."""
    if api not in _COUNTED:
        return Opening.NOTHING if list(_events(data)) == [_DONE] else Opening.OUTPUT
    aborted = False
    for event in _events(data):
        if event == _DONE:
            return Opening.NOTHING
        answer = _decode(event)
        if answer is not None and answer.error:  # what engines find out behind the 200; others would say the same
            return Opening.NOTHING if _SHUT_DOWN in event else Opening.OUTPUT
        if answer is None or not all(choice.empty for choice in answer.choices or ()):
            return Opening.OUTPUT
        aborted = aborted or any(choice.finish_reason == "abort" for choice in answer.choices or ())
    return Opening.NOTHING if aborted else Opening.UNDECIDED


def begins_output(api: Api, chunk: bytes) -> bool:
    """Prefill is over. A Responses stream begins with events that the engine sends before it has done anything."""
    return api is not Api.RESPONSES or b"response.output_item" in chunk or b".delta" in chunk


def _events(data: bytes) -> Iterator[bytes]:
    lines = (line.strip() for line in data.splitlines())
    return (line[5:].strip() for line in lines if line.startswith(b"data:"))


def _decode(body: bytes) -> _Answer | None:
    try:
        return _DECODER.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return None
