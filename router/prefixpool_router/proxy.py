"""Attempts at answering one request: send, judge, and try elsewhere for as long as nothing has reached the client."""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web

from prefixpool.errors import RequestError
from prefixpool_router.answer import Answer, open_answer
from prefixpool_router.delivery import Delivery
from prefixpool_router.dispatch_types import Dispatch, Dispatcher, EngineKeyError, NotYetError, Outcome
from prefixpool_router.exchange import Exchange
from prefixpool_router.failures import BusyError, KeyRefusedError, ResetError, SilentError, UnansweredError
from prefixpool_router.metrics import EdgeMetrics
from prefixpool_router.settings import RouterSettings
from prefixpool_router.upstream import Upstream
from prefixpool_router.waiting_room import WaitingRoom
from prefixpool_router.watchdog import expect

_CLIENT_GONE: Final = 499
_MAX_RESETS: Final = 2  # a request whose engines keep dying may be what kills them
_RETRY_AFTER_S: Final = 1


class Proxy:
    """Holds no state between requests."""

    def __init__(self, dispatcher: Dispatcher, upstream: Upstream, metrics: EdgeMetrics, settings: RouterSettings) -> None:
        self._dispatcher = dispatcher
        self._upstream = upstream
        self._metrics = metrics
        self._silence_s = settings.silence_timeout_s
        self._write_s = settings.write_timeout_s
        self._patience_s = settings.queue_timeout_s
        self._room = WaitingRoom(most=settings.max_queued)
        dispatcher.when_room(self._room.wake)

    @property
    def waiting(self) -> int:
        """Requests that found every replica full."""
        return self._room.waiting

    async def serve(self, exchange: Exchange) -> web.StreamResponse:
        """Raises RequestError if no replica answered; then nothing has been sent to the client."""
        failures: dict[str, UnansweredError] = {}
        until_s = asyncio.get_running_loop().time() + self._patience_s
        while True:
            dispatch = await self._place(exchange, failures, until_s)
            exchange.visit.placed(dispatch)
            try:
                answer = await self._attempt(exchange, dispatch)
            except UnansweredError as failure:
                dispatch.abandon(failure.why, replica_down=failure.replica_down)
                failures[dispatch.replica] = failure
                _check_retry(exchange, failures, failure)
                self._metrics.retries.labels(failure.why).inc()
            except BaseException:  # above all cancellation: the client went away, and the booking must end with it
                dispatch.finish(Outcome(status=_CLIENT_GONE, error="no answer", aborted=True))
                raise
            else:
                return await self._deliver(exchange, dispatch, answer)

    async def _place(self, exchange: Exchange, failures: dict[str, UnansweredError], until_s: float) -> Dispatch:
        """Waits for room, if that is all that is missing."""
        try:
            return self._dispatch(exchange, failures)
        except NotYetError:
            for replica in [replica for replica, failure in failures.items() if isinstance(failure, BusyError)]:
                del failures[replica]  # full like the others: worth asking again
            model = str((exchange.routed.body or {}).get("model", ""))
            return await self._room.until(lambda: self._dispatch(exchange, failures), kind=model, deadline_s=until_s)

    def _dispatch(self, exchange: Exchange, failures: dict[str, UnansweredError]) -> Dispatch:
        try:
            return self._dispatcher.dispatch(exchange.routed, frozenset(failures))
        except NotYetError:
            raise
        except RequestError as error:
            if not failures:
                raise
            if all(isinstance(failure, KeyRefusedError) for failure in failures.values()):
                raise EngineKeyError from error
            causes = ", ".join(sorted({failure.why for failure in failures.values()}))
            message = f"No replica could take the request ({len(failures)} tried: {causes})."
            raise RequestError(503, message, retry_after_s=error.retry_after_s or _RETRY_AFTER_S) from error

    async def _attempt(self, exchange: Exchange, dispatch: Dispatch) -> Answer:
        failures: list[UnansweredError] = []
        try:
            async with asyncio.timeout(None) as limit:

                def give_up(failure: UnansweredError) -> None:
                    failures.append(failure)
                    limit.reschedule(0.0)

                dog = expect(dispatch, silence_s=self._silence_s, give_up=give_up)
                try:
                    request = exchange.engine_request(dispatch.kv_transfer_params)
                    response = await self._upstream.send(dispatch.engine_url, request)
                    return await open_answer(exchange.api, response)
                finally:
                    dog.close()
        except TimeoutError as error:
            raise failures[0] from error

    async def _deliver(self, exchange: Exchange, dispatch: Dispatch, answer: Answer) -> web.StreamResponse:
        delivery = Delivery(
            exchange, dispatch, answer, metrics=self._metrics, silence_s=self._silence_s, write_s=self._write_s
        )
        return await delivery.run()


def _check_retry(exchange: Exchange, failures: dict[str, UnansweredError], failure: UnansweredError) -> None:
    """Raises RequestError if this was the last attempt."""
    if exchange.refusal is not None:
        raise exchange.refusal
    if isinstance(failure, SilentError):
        raise RequestError(504, "The engine did not answer in time.") from failure
    if sum(isinstance(each, ResetError) for each in failures.values()) >= _MAX_RESETS:
        raise RequestError(502, "Two engines broke off before they answered.") from failure
    if not exchange.repeatable and isinstance(failure, KeyRefusedError):
        raise EngineKeyError from failure
    if not exchange.repeatable:
        raise RequestError(502, "The engine broke off while the request body was being passed on.") from failure
