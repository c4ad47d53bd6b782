"""The router's HTTP side for clients: one handler for every path, and its life from listening to drained.

Whatever is wrong with a request is a RequestError, raised where it is found and put into the client's dialect here.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable
from typing import Final

from aiohttp import HttpVersion10, HttpVersion11, web

from prefixpool import names
from prefixpool.errors import Dialect, RequestError
from prefixpool.listening import bound
from prefixpool_router import headers
from prefixpool_router.access_log import AccessLog, Ended, Visit
from prefixpool_router.credentials import Credentials
from prefixpool_router.dispatch_types import Dispatcher
from prefixpool_router.exchange import Arrived, Exchange
from prefixpool_router.intake import Intake
from prefixpool_router.limits import Admission, BodyBudget, BodyShare, OverBudgetError, check_coding, is_held_back
from prefixpool_router.metrics import EdgeMetrics
from prefixpool_router.paths import Api, allowed_methods, route
from prefixpool_router.proxy import Proxy
from prefixpool_router.served_models import listed
from prefixpool_router.server import ClientServer, refusal
from prefixpool_router.settings import RouterSettings
from prefixpool_router.tls import listening_tls, server_tls
from prefixpool_router.upstream import Upstream

_log = logging.getLogger(__name__)

_CLIENT_GONE: Final = 499
_BACKLOG: Final = 4096


class Edge:
    """Serves clients until `stop`. Raises SettingsError at once for unusable key or certificate files.

    `ready`: whether clients should come here, for load balancers that ask on this port.
    """

    def __init__(
        self,
        settings: RouterSettings,
        dispatcher: Dispatcher,
        metrics: EdgeMetrics,
        credentials: Credentials,
        *,
        ready: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._credentials = credentials
        self._ready = ready
        self._access_log = AccessLog(enabled=settings.access_log)
        self._tls = server_tls(settings.tls_cert_file, settings.tls_key_file)
        self._intake = Intake(credentials, settings)
        self._admission = Admission(
            limit=settings.max_inflight, queue=settings.max_queued, deadline_s=settings.queue_timeout_s
        )
        # Whatever is a permitted body must fit when no other is there.
        self._bodies = BodyBudget(max(settings.max_buffered_bytes, settings.max_body_bytes))
        self.port = 0  # of all listeners, once started
        self._listeners: list[asyncio.Server] = []  # one for each address of the host
        self._closing = False
        self._cutting_off = False
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        metrics.open_requests.set_function(lambda: self._open)
        metrics.body_bytes.set_function(lambda: self._bodies.held)

    async def start(self, *, shared: bool = False) -> None:
        """Listen. `shared`: other processes may have the port, too. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._upstream = Upstream(connect_s=self._settings.connect_timeout_s)
        self._proxy = Proxy(self._dispatcher, self._upstream, self._metrics, self._settings)
        self._metrics.waiting_requests.set_function(lambda: self._admission.waiting + self._proxy.waiting)
        self._server = ClientServer(
            self.handle,
            idle_s=self._settings.idle_timeout_s,
            unread_s=self._settings.write_timeout_s,
            refused=self._access_log.garbled,
        )
        tls = listening_tls(self._tls, handshake_s=self._settings.idle_timeout_s)
        for sock in bound(self._settings.host, self._settings.port, shared=shared):
            self._listeners.append(await loop.create_server(self._server, sock=sock, backlog=_BACKLOG, **tls))
            self.port = int(sock.getsockname()[1])
        self._watcher = loop.create_task(self._watch_files(), name="edge files")

    @property
    def open_requests(self) -> int:
        return self._open

    def begin_drain(self) -> None:
        """From now on every answer asks its client to connect anew; requests are still taken."""
        self._closing = True

    async def stop(self, timeout_s: float) -> int:
        """Listen no more, wait for running answers, cut off the rest; how many were cut off."""
        self.begin_drain()
        for listener in self._listeners:
            listener.close()
        self._server.pre_shutdown()  # closes idle connections
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            _log.warning("Answers were cut off", extra={"open_requests": self._open})
        cut_off = self._open
        self._cutting_off = True
        self._watcher.cancel()
        await asyncio.gather(self._watcher, return_exceptions=True)
        await self._server.shutdown(0.1)
        await self._upstream.close()
        return cut_off

    async def _watch_files(self) -> None:
        while True:
            await asyncio.sleep(self._settings.files_interval_s)
            self._credentials.refresh()
            if self._tls is not None:
                self._tls.refresh()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """One request. Lets ConnectionError and cancellation through: then nobody is left to be answered."""
        request_id = headers.request_id(request.headers)
        self._open += 1
        self._idle.clear()
        api = Api.OTHER
        status = _CLIENT_GONE
        clock = asyncio.get_running_loop().time
        started_s = clock()
        visit = Visit(request_id, request.raw_path.partition("?")[0])
        try:
            try:
                found = route(visit.path, engine_store=self._settings.engine_store)
                api = found.api
                with self._bodies.share() as share:
                    arrived = Arrived(request, found, request_id, started_s, self._closing, visit)
                    response = await self._answer(arrived, share)
            except RequestError as error:
                visit.end(Ended.REFUSED)
                response = self._refuse(request, error, visit)
            except (ConnectionError, asyncio.CancelledError):
                visit.end(Ended.STOPPED if self._cutting_off else Ended.CLIENT_GONE)
                raise
            except Exception as error:  # noqa: BLE001 -- the request's boundary: a fault of ours must cost this request only
                visit.end(Ended.ROUTER_FAILED)
                _log_fault(error, request_id)
                response = self._refuse(request, RequestError(500, "The router failed."), visit)
            status = response.status
            if not response.prepared:  # it is the router's own, and leaves after this
                visit.body_bytes = int(response.content_length or 0)
            return response
        finally:
            if api is not Api.HEALTH:  # load balancers ask so often that no failure would stand out
                self._metrics.requests.labels(api, str(status)).inc()
                self._access_log.write(visit, status, clock() - started_s)
            self._open -= 1
            if not self._open:
                self._idle.set()

    async def _answer(self, arrived: Arrived, share: BodyShare) -> web.StreamResponse:
        if arrived.request.version not in (HttpVersion10, HttpVersion11):
            raise RequestError(505, "This server speaks HTTP/1.1.")
        check_coding(arrived.request)
        methods = allowed_methods(arrived.route)
        if arrived.request.method == "OPTIONS":
            return web.Response(status=204, headers={"Allow": ", ".join(methods), "Server": names.SERVER})
        if arrived.request.method not in methods:
            raise RequestError(405, f"Method not allowed; this path takes {', '.join(methods)}.")
        if arrived.route.api is Api.HEALTH:
            return self._health()
        exchange = await self._intake.read(arrived, share)
        if arrived.request.method in ("GET", "HEAD"):
            return await self._ask(exchange)
        await self._admission.enter()
        try:
            response = await self._proxy.serve(exchange)
        finally:
            self._admission.leave()
        self._metrics.answer_seconds.labels(exchange.api).observe(exchange.age_s())
        return response

    def _health(self) -> web.Response:
        """Anybody may know that much, but not why."""
        response = web.Response(status=200 if self._ready() else 503, headers={"Server": names.SERVER})
        if self._closing:
            response.force_close()
        return response

    async def _ask(self, exchange: Exchange) -> web.StreamResponse:
        try:
            return await self._proxy.serve(exchange)
        except RequestError as error:
            if exchange.api is not Api.MODELS or error.status != 503 or not self._settings.served_models:
                raise
            return listed(self._settings.served_models, exchange.routed.request_id)

    def _refuse(self, request: web.BaseRequest, error: RequestError, visit: Visit) -> web.StreamResponse:
        if request.writer.output_size > 0:  # nothing sensible can follow what was sent
            raise ConnectionError("the answer had begun") from error
        self._metrics.rejected.labels(str(error.status)).inc()
        response = refusal(error, Dialect.of_path(request.raw_path), visit.request_id)
        last = error.status in (408, 413, 501) or isinstance(error, OverBudgetError) or is_held_back(request)
        if self._closing or last:
            response.force_close()
        return response


def _log_fault(error: Exception, request_id: str) -> None:
    """Where, but not the message: it might quote a prompt."""
    stack = "".join(traceback.format_tb(error.__traceback__))
    _log.error("Request failed", extra={"error": type(error).__name__, "request_id": request_id, "stack": stack})
