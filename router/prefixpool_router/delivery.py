"""Giving an engine's answer to the client, and the outcome to the dispatcher."""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web
from multidict import CIMultiDict

from prefixpool import names
from prefixpool.errors import RequestError, error_event
from prefixpool_router import headers, verdict
from prefixpool_router.answer import Answer
from prefixpool_router.dispatch_types import Dispatch, Outcome
from prefixpool_router.exchange import Exchange
from prefixpool_router.failures import SilentError, UnansweredError
from prefixpool_router.metrics import EdgeMetrics
from prefixpool_router.usage import UNKNOWN, StreamMeter, Usage, usage_of_answer
from prefixpool_router.watchdog import Watchdog, watch

_BUFFERED_BYTES: Final = 1 << 15  # what a connection takes without waiting for its client
_CLIENT_GONE: Final = "the client went away"


class LateHeaders(web.StreamResponse):
    """Its head leaves together with the first chunk, in one packet."""

    _send_headers_immediately = False


class Delivery:
    """One answer on its way. `run` books its outcome on every path."""

    def __init__(
        self,
        exchange: Exchange,
        dispatch: Dispatch,
        answer: Answer,
        *,
        metrics: EdgeMetrics,
        silence_s: float,
        write_s: float,
    ) -> None:
        self._exchange = exchange
        self._dispatch = dispatch
        self._answer = answer
        self._metrics = metrics
        self._silence_s = silence_s
        self._write_s = write_s
        self._meter = StreamMeter(withhold=exchange.withhold) if answer.is_stream else None
        self._began = False

    async def run(self) -> web.StreamResponse:
        """Raises ConnectionError or CancelledError if the client goes away."""
        return await (self._send_whole() if self._answer.whole else self._relay())

    async def _send_whole(self) -> web.StreamResponse:
        body = b"".join(self._answer.head)
        status = self._answer.response.status
        usage = usage_of_answer(body) if status == 200 else UNKNOWN
        self._finish(usage)  # the engine is done with it, however long the client takes
        fields = self._headers()
        if usage.cached is not None:
            fields[names.H_CACHED] = str(usage.cached)
        response = web.Response(status=status, reason=self._answer.response.reason, body=body, headers=fields)
        self._exchange.announce_close(response)
        try:
            async with asyncio.timeout(self._write_s if len(body) > _BUFFERED_BYTES else None):
                await response.prepare(self._exchange.request)
                await response.write_eof()
        except TimeoutError:
            self._exchange.abort()
        return response

    async def _relay(self) -> web.StreamResponse:
        answer, request = self._answer, self._exchange.request
        response = LateHeaders(status=answer.response.status, reason=answer.response.reason, headers=self._headers())
        self._exchange.announce_close(response)
        dog = watch(self._dispatch, answer.response, request, read_s=self._silence_s, write_s=self._write_s)
        try:
            await response.prepare(request)
            await self._pump(response, dog)
        except UnansweredError as broken:
            await self._break_off(response, dog, broken)
        except (ConnectionError, asyncio.CancelledError):
            self._finish(self._usage(), error=_CLIENT_GONE, aborted=True)
            raise
        finally:
            dog.close()
            answer.response.close()
        return response

    async def _pump(self, response: web.StreamResponse, dog: Watchdog) -> None:
        for chunk in self._answer.head:
            await self._pass_on(chunk, response, dog)
        read, meter = self._answer.response.next, self._meter
        dog.reading()
        while chunk := await read():
            await self._pass_on(chunk, response, dog)
            dog.reading()
        dog.writing()
        if meter is not None and (rest := meter.end()):
            await response.write(rest)
        self._finish(self._usage())
        await response.write_eof()

    async def _pass_on(self, chunk: bytes, response: web.StreamResponse, dog: Watchdog) -> None:
        if not self._began:
            self._note_begin(chunk)
        if self._meter is not None:
            chunk = self._meter.feed(chunk)
        if chunk:
            dog.writing()
            await response.write(chunk)

    def _note_begin(self, chunk: bytes) -> None:
        if verdict.begins_output(self._exchange.api, chunk):
            self._began = True
            self._dispatch.first_byte()
            self._metrics.first_byte_seconds.labels(self._exchange.api.value).observe(self._exchange.age_s())

    async def _break_off(self, response: web.StreamResponse, dog: Watchdog, broken: UnansweredError) -> None:
        """The client has a part of the answer: say that it is broken, in a way that no client can take for its end."""
        self._metrics.broken_streams.labels(broken.why).inc()
        self._finish(self._usage(), error=f"stream broken: {broken.why}")
        if self._meter is None:
            self._exchange.abort()  # no terminating chunk, or fewer bytes than declared
            return
        if isinstance(broken, SilentError):
            error = RequestError(504, "The engine fell silent in the middle of its answer.")
        else:
            error = RequestError(502, "The engine broke off in the middle of its answer.")
        dog.writing()
        event = error_event(error, self._exchange.dialect)
        await response.write(b"\n\n" + event if self._meter.mid_event else event)
        await response.write_eof()

    def _usage(self) -> Usage:
        return self._meter.usage if self._meter is not None else UNKNOWN

    def _finish(self, usage: Usage, *, error: str = "", aborted: bool = False) -> None:
        self._dispatch.finish(
            Outcome(
                status=self._answer.response.status,
                prompt_tokens=usage.prompt,
                cached_tokens=usage.cached,
                output_tokens=usage.output,
                error=error,
                aborted=aborted,
            )
        )

    def _headers(self) -> CIMultiDict[str]:
        own = {
            names.H_REQUEST_ID: self._exchange.routed.request_id,
            names.H_REPLICA: self._dispatch.replica,
            names.H_REASON: self._dispatch.reason,
            names.H_PREDICTED: str(self._dispatch.predicted_tokens),
        }
        fields = headers.for_client(self._answer.response.headers, own)
        if self._meter is not None:
            fields.popall("Content-Length", None)  # a stream may lose its usage chunk, or end with an error event
        return fields
