"""An engine's answer, read as far as it takes to know that the engine works on the request."""

from __future__ import annotations

import asyncio
from typing import Final

from prefixpool import names
from prefixpool_router import verdict
from prefixpool_router.engine_answer import EngineAnswer
from prefixpool_router.failures import BusyError, EmptyError, KeyRefusedError
from prefixpool_router.paths import Api

_MAX_WHOLE_BYTES: Final = 32 << 20  # a longer answer is relayed as it comes, without the cached-tokens header
_ROLE_GRACE_S: Final = 0.01  # how long a bare role chunk waits for what engines send together with it
_WHOLE: Final = frozenset(Api) - {Api.OTHER}


class Answer:
    """One that will go to the client. `head`: chunks read already; `whole`: that is all of it."""

    __slots__ = ("head", "is_stream", "response", "whole")

    def __init__(self, response: EngineAnswer) -> None:
        self.response = response
        self.head: list[bytes] = []
        self.whole = False
        self.is_stream = response.headers.get("Content-Type", "").startswith("text/event-stream")


async def open_answer(api: Api, response: EngineAnswer) -> Answer:
    """Raises UnansweredError. The response is closed then, and on cancellation: that frees the engine at once."""
    answer = Answer(response)
    try:
        await _read_opening(api, answer)
    except BaseException:
        response.close()
        raise
    return answer


async def _read_opening(api: Api, answer: Answer) -> None:
    status, headers = answer.response.status, answer.response.headers
    if status == 401:
        raise KeyRefusedError
    if status == 200 and answer.is_stream:
        await _read_first_event(api, answer)
    elif api in _WHOLE or status >= 500:
        await _read_whole(answer)
    if answer.whole:
        _judge(api, status, fenced=names.H_FENCED in headers, body=b"".join(answer.head))


def _judge(api: Api, status: int, *, fenced: bool, body: bytes) -> None:
    if verdict.refuses_work(status, body):
        raise BusyError("fenced" if fenced else "busy" if status == 503 else "shutdown")
    if status == 200 and verdict.is_cut_short(api, body):
        raise EmptyError


async def _read_first_event(api: Api, answer: Answer) -> None:
    found = await _read_more(api, answer)
    if found is verdict.Opening.UNDECIDED:
        try:
            async with asyncio.timeout(_ROLE_GRACE_S):
                while found is verdict.Opening.UNDECIDED:
                    found = await _read_more(api, answer)
        except TimeoutError:
            return  # the role alone goes out now; what follows can no longer be had from elsewhere
    if found is verdict.Opening.NOTHING:
        raise EmptyError


async def _read_more(api: Api, answer: Answer) -> verdict.Opening:
    chunks = await answer.response.chunks()
    if not chunks:
        return verdict.Opening.NOTHING
    answer.head += chunks
    return verdict.opening(api, b"".join(answer.head))


async def _read_whole(answer: Answer) -> None:
    size = 0
    while chunks := await answer.response.chunks():
        answer.head += chunks
        size += sum(map(len, chunks))
        if size > _MAX_WHOLE_BYTES:
            return
    answer.whole = True
