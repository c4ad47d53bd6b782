"""Giving an engine's answer to the client, and the outcome to the dispatcher."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from aiohttp import web
from multidict import CIMultiDict

from prefixpool import names
from prefixpool.errors import RequestError, error_event
from prefixpool_router import headers, verdict
from prefixpool_router.access_log import Ended
from prefixpool_router.answer import Answer
from prefixpool_router.dispatch_types import Dispatch, Outcome
from prefixpool_router.exchange import Exchange
from prefixpool_router.failures import SilentError, UnansweredError
from prefixpool_router.metrics import EdgeMetrics
from prefixpool_router.relayed_response import RelayedResponse
from prefixpool_router.usage import UNKNOWN, StreamMeter, Usage, usage_of_answer
from prefixpool_router.watchdog import Watchdog, watch

_BUFFERED_BYTES: Final = 1 << 15  # what a connection takes without waiting for its client
_CLIENT_GONE: Final = "the client went away"
_OUR_FAULT: Final = "the router failed"


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
        self._exchange.visit.first_byte_s = self._exchange.age_s()
        self._exchange.visit.body_bytes = len(body)
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
            self._exchange.visit.end(Ended.CLIENT_GONE)
            self._exchange.abort()
        return response

    async def _relay(self) -> web.StreamResponse:
        answer, request = self._answer, self._exchange.request
        response = RelayedResponse(status=answer.response.status, reason=answer.response.reason, headers=self._headers())
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
        except BaseException:  # a fault of ours: its booking must not outlive it
            self._finish(self._usage(), error=_OUR_FAULT)
            raise
        finally:
            dog.close()
            answer.response.close()
        return response

    async def _pump(self, response: RelayedResponse, dog: Watchdog) -> None:
        answer, chunks = self._answer.response, self._answer.head
        while not answer.ended:
            dog.writing()
            await response.write_chunks(self._outgoing(chunks))
            dog.reading()
            chunks = await answer.chunks()
        dog.writing()
        last = self._outgoing(chunks)
        if self._meter is not None and (rest := self._meter.end()):
            last.append(rest)
            self._exchange.visit.body_bytes += len(rest)
        self._finish(self._usage())
        await response.write_last(last)

    def _outgoing(self, chunks: Sequence[bytes]) -> list[bytes]:
        """What the client gets of these."""
        if not self._began and any(verdict.begins_output(self._exchange.api, chunk) for chunk in chunks):
            self._began = True
            self._dispatch.first_byte()
            self._exchange.visit.first_byte_s = age_s = self._exchange.age_s()
            self._metrics.first_byte_seconds.labels(self._exchange.api).observe(age_s)
        passed = list(chunks) if self._meter is None else [out for out in map(self._meter.feed, chunks) if out]
        self._exchange.visit.body_bytes += sum(map(len, passed))
        return passed

    async def _break_off(self, response: RelayedResponse, dog: Watchdog, broken: UnansweredError) -> None:
        """The client has a part of the answer: say that it is broken, in a way that no client can take for its end."""
        self._metrics.broken_streams.labels(broken.why).inc()
        self._exchange.visit.end(Ended(f"engine_{broken.why}"))
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
        await response.write_last([b"\n\n" + event if self._meter.mid_event else event])

    def _usage(self) -> Usage:
        return self._meter.usage if self._meter is not None else UNKNOWN

    def _finish(self, usage: Usage, *, error: str = "", aborted: bool = False) -> None:
        outcome = Outcome(
            status=self._answer.response.status,
            prompt_tokens=usage.prompt,
            cached_tokens=usage.cached,
            output_tokens=usage.output,
            error=error,
            aborted=aborted,
        )
        self._exchange.visit.answered(outcome)
        self._dispatch.finish(outcome)

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
