"""What one router takes on: requests in flight with a bounded queue; bodies with a size, a deadline and one budget."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Final, NamedTuple

from aiohttp import HttpVersion11, hdrs, web
from multidict import CIMultiDictProxy

from prefixpool.errors import RequestError

_RETRY_AFTER_S: Final = 1
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class Admission:
    """At most `limit` requests inside (0: any number); others wait in order of arrival, at most `queue` of them for at most
    `deadline_s` seconds each."""

    def __init__(self, *, limit: int, queue: int, deadline_s: float) -> None:
        self._limit = limit
        self._queue = queue
        self._deadline_s = deadline_s
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.inside = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def enter(self) -> None:
        """Take a place, to be given back by `leave`. Raises RequestError 429 if the queue is full or the deadline passes."""
        if self._limit and self.inside >= self._limit:
            await self._wait()  # whoever leaves hands its place over: `inside` counts us already
        else:
            self.inside += 1

    def leave(self) -> None:
        """Give the place to whoever waits longest."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.inside -= 1

    async def _wait(self) -> None:
        if self.waiting >= self._queue:
            raise _too_many("The pool is at its limit and the queue is full.")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(self._deadline_s):
                await turn
        except BaseException as error:  # cancellation too: a place that was handed over meanwhile must go on to the next
            if turn.done() and not turn.cancelled():
                self.leave()
            elif turn in self._waiting:
                self._waiting.remove(turn)
            if isinstance(error, TimeoutError):
                raise _too_many("The pool is at its limit; no place became free in time.") from None
            raise


class BodyLimits(NamedTuple):
    """Of one request body."""

    max_bytes: int
    timeout_s: float  # for all of it


class OverBudgetError(RequestError):
    """429: the process holds as many bytes of request bodies as it may; the rest of this one is not read."""

    def __init__(self) -> None:
        super().__init__(429, "The router holds too many request bodies.", retry_after_s=_RETRY_AFTER_S)


class BodyBudget:
    """At most `limit` bytes of request bodies in memory. Bytes count from when they arrive, since a declared length costs a
    client nothing, until their request has ended."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0

    @property
    def held(self) -> int:
        return self._held

    def share(self) -> BodyShare:
        """What one request takes."""
        return BodyShare(self)

    def take(self, size: int) -> None:
        """By shares only. Raises OverBudgetError."""
        if self._held + size > self._limit:
            raise OverBudgetError
        self._held += size

    def give_back(self, size: int) -> None:
        """By shares only."""
        self._held -= size


class BodyShare:
    """One request's part of a BodyBudget: given back at the end of the block that it stands for, however that comes."""

    __slots__ = ("_budget", "taken")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.taken = 0

    def __enter__(self) -> BodyShare:
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.give_back(self.taken)

    def take(self, size: int) -> None:
        """Count bytes that arrived. Raises OverBudgetError, and then they must not be kept."""
        self._budget.take(size)
        self.taken += size


async def read_body(request: web.BaseRequest, limits: BodyLimits, share: BodyShare) -> bytes:
    """The whole body. Raises RequestError 413 as soon as it is known to be too large, 408 if it is not there in time, and
    OverBudgetError as soon as its share cannot hold it."""
    if request.content.is_eof():  # it came with the head, as short ones do: no deadline is needed
        raw = request.content.read_nowait()
        if len(raw) > limits.max_bytes:
            raise _too_large(limits.max_bytes)
        share.take(len(raw))
        return raw
    answer_expectation(request)
    body = bytearray()  # not a list of pieces: tiny ones would weigh many times what was counted
    try:
        async with asyncio.timeout(limits.timeout_s):
            while piece := await _piece(request):
                if len(body) + len(piece) > limits.max_bytes:
                    raise _too_large(limits.max_bytes)
                share.take(len(piece))
                body += piece
    except TimeoutError:
        raise _too_slow(limits.timeout_s) from None
    return bytes(body)


async def arriving(request: web.BaseRequest, limits: BodyLimits) -> AsyncGenerator[bytes]:
    """The body piece by piece, none of them kept. Raises RequestError 413, 408, or 400 for a body that breaks off."""
    check_declared(request, limits)
    if request.content.at_eof():
        return
    answer_expectation(request)
    size = 0
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limits.timeout_s
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                piece = await _piece(request)
        except TimeoutError:
            raise _too_slow(limits.timeout_s) from None
        if not piece:
            return
        size += len(piece)
        if size > limits.max_bytes:
            raise _too_large(limits.max_bytes)
        yield piece


async def _piece(request: web.BaseRequest) -> bytes:
    try:
        return await request.content.readany()
    except web.RequestPayloadError as error:
        raise RequestError(400, "The request body is incomplete or badly framed.") from error


def check_declared(request: web.BaseRequest, limits: BodyLimits) -> None:
    """Raises RequestError 413 before anything of a too large body is read."""
    if request.content_length is not None and request.content_length > limits.max_bytes:
        raise _too_large(limits.max_bytes)


def check_coding(request: web.BaseRequest) -> None:
    """Raises RequestError 501 for a transfer coding besides `chunked`: nobody here undoes it, or passes it on."""
    if not is_plain(request.headers):
        raise RequestError(501, "Request bodies must not be encoded for transfer other than `chunked`.")


def is_plain(headers: CIMultiDictProxy[str]) -> bool:
    """Without a transfer coding, or with `chunked` alone, which the HTTP parser undoes."""
    return all(coding.strip().lower() == "chunked" for coding in headers.getall(hdrs.TRANSFER_ENCODING, ()))


def answer_expectation(request: web.BaseRequest) -> None:
    """Clients with a large body ask first; the low-level server leaves the answer to us."""
    transport = request.transport
    if _asks_first(request) and transport is not None and not transport.is_closing():
        transport.write(_CONTINUE)


def is_held_back(request: web.BaseRequest) -> bool:
    """Its client asked first, and may now never send the body: then its next request would be taken for that."""
    return _asks_first(request) and not request.content.is_eof()


def _asks_first(request: web.BaseRequest) -> bool:
    # HTTP/1.0 knows no interim answers: a client of it would take one for the answer.
    return request.headers.get("Expect", "").lower() == "100-continue" and request.version >= HttpVersion11


def _too_many(message: str) -> RequestError:
    return RequestError(429, message, retry_after_s=_RETRY_AFTER_S)


def _too_slow(timeout_s: float) -> RequestError:
    return RequestError(408, f"The request body did not arrive within {timeout_s:g} seconds.")


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(413, f"The request body is larger than {max_bytes} bytes.")
