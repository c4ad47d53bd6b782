"""The agent's HTTP side: streams to routers, control API, probes, metrics. Parses and answers; decides nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from prefixpool import names, wire
from prefixpool_agent.defect import log_defect
from prefixpool_agent.drain import Drain, DrainRefusedError
from prefixpool_agent.gate.keys import KeyFile
from prefixpool_agent.publisher import Publisher, RouterLink

HELLO_S: Final = 5.0
SEND_S: Final = 10.0  # a router that takes no byte for so long is cut off; it comes back to a new snapshot
PING_S: Final = 10.0
CLOSE_S: Final = 2.0
MAX_FRAME_BYTES: Final = 64 << 10  # from routers: greetings and acknowledgements only
MAX_BODY_BYTES: Final = 64 << 10
_KEYED: Final = frozenset({names.PATH_STREAM, names.PATH_INFO, names.PATH_DRAIN})

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger(__name__)


class AgentView(Protocol):
    """What the server asks the agent."""

    def info(self) -> wire.Info:
        """For `/info`."""
        ...

    def not_ready(self) -> str:
        """Why the engine takes no requests; "" = it does."""
        ...

    def refresh(self) -> None:
        """Bring gauges up to date before they are read."""
        ...


class Server:
    """Builds the application; `main` runs it."""

    def __init__(
        self,
        *,
        view: AgentView,
        publisher: Publisher,
        drain: Drain,
        keys: KeyFile,
        registry: CollectorRegistry,
        drain_timeout_s: float,
    ) -> None:
        self._view = view
        self._publisher = publisher
        self._drain = drain
        self._keys = keys
        self._registry = registry
        self._drain_timeout_s = drain_timeout_s
        self._sockets: set[web.WebSocketResponse] = set()

    def application(self) -> web.Application:
        """Routes and the key check."""
        app = web.Application(middlewares=[self._check_key], client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get(names.PATH_STREAM, self._stream),
                web.get(names.PATH_INFO, self._info),
                web.get(names.PATH_DRAIN, self._drain_get),
                web.post(names.PATH_DRAIN, self._drain_post),
                web.delete(names.PATH_DRAIN, self._drain_delete),
                web.get(names.PATH_HEALTHZ, self._healthz),
                web.get(names.PATH_READYZ, self._readyz),
                web.get(names.PATH_METRICS, self._metrics),
            ]
        )
        app.on_response_prepare.append(_sign)
        app.on_shutdown.append(self._close_streams)
        return app

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in _KEYED:
            headers = [(name.lower(), value) for name, value in request.raw_headers]
            if not self._keys.accepts(headers):
                return _json({"error": "the pool's engine key is needed, as a bearer token"}, status=401)
        return await handler(request)

    # -- control -----------------------------------------------------------------------------------------------------

    async def _info(self, request: web.Request) -> web.Response:
        return _json(self._view.info())

    async def _drain_get(self, request: web.Request) -> web.Response:
        return _json(self._drain.status())

    async def _drain_post(self, request: web.Request) -> web.Response:
        try:
            order = self._drain_request(await request.read())
        except msgspec.MsgspecError as error:
            return _json({"error": str(error)}, status=400)
        status = self._drain.start(order)
        if not order.wait:
            return _json(status, status=202)
        return _json(await self._drain.wait())

    def _drain_request(self, body: bytes) -> wire.DrainRequest:
        given = msgspec.json.decode(body, type=dict[str, Any]) if body.strip() else {}
        request = msgspec.convert({"timeout_s": self._drain_timeout_s, **given}, wire.DrainRequest)
        if request.timeout_s < 0:
            raise msgspec.ValidationError("timeout_s must not be negative")
        return request

    async def _drain_delete(self, request: web.Request) -> web.Response:
        try:
            return _json(self._drain.lift())
        except DrainRefusedError as error:
            return _json({"error": str(error)}, status=409)

    # -- probes ------------------------------------------------------------------------------------------------------

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        """With `?router=1` also only if a router has a whole snapshot: then the pool really knows this replica.

        With `?download=1` also while the model is downloaded, for a probe that ends what does not come up.
        """
        why = self._view.not_ready()
        if why and request.query.get("download") == "1" and self._view.info().download is not None:
            return web.Response(text="downloading\n")
        if not why and request.query.get("router") == "1" and not self._publisher.synchronised():
            why = "no router has a snapshot yet"
        return web.Response(text=f"{why or 'ok'}\n", status=503 if why else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        self._view.refresh()
        return web.Response(body=generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})

    # -- streams -----------------------------------------------------------------------------------------------------

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        if self._publisher.full:
            return _json({"error": "too many routers"}, status=503)
        socket = web.WebSocketResponse(max_msg_size=MAX_FRAME_BYTES, heartbeat=PING_S, timeout=CLOSE_S, compress=False)
        await socket.prepare(request)
        self._sockets.add(socket)
        try:
            hello = await self._hello(socket)
            if hello is not None:
                await self._serve(socket, self._publisher.join(hello.router), request.transport)
        finally:
            self._sockets.discard(socket)
        return socket

    async def _hello(self, socket: web.WebSocketResponse) -> wire.Hello | None:
        """None: closed, with a code that says why."""
        try:
            first = await socket.receive_bytes(timeout=HELLO_S)
            hello = wire.decode_from_router(first)
        except (TimeoutError, TypeError, msgspec.MsgspecError):
            hello = None
        if isinstance(hello, wire.Hello) and hello.version == wire.VERSION:
            return hello
        found = f"version {hello.version}" if isinstance(hello, wire.Hello) else "no greeting"
        await socket.close(code=wire.CLOSE_VERSION, message=f"expected version {wire.VERSION}, got {found}".encode())
        return None

    async def _serve(self, socket: web.WebSocketResponse, link: RouterLink, transport: asyncio.Transport | None) -> None:
        log.info("router connected", extra={"router": link.name})
        writer = asyncio.create_task(self._write(socket, link, transport), name="router writer")
        try:
            async for message in socket:
                if message.type is WSMsgType.BINARY:
                    self._heard(link, message.data)
        except msgspec.MsgspecError as error:
            await socket.close(code=wire.CLOSE_VERSION, message=str(error).encode()[:120])
        finally:
            self._publisher.leave(link)
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            log.info("router disconnected", extra={"router": link.name})

    def _heard(self, link: RouterLink, frame: bytes) -> None:
        message = wire.decode_from_router(frame)
        if isinstance(message, wire.FenceAck):
            link.acknowledged_epoch = message.epoch

    async def _write(self, socket: web.WebSocketResponse, link: RouterLink, transport: asyncio.Transport | None) -> None:
        try:
            while not link.closing:
                frame = self._publisher.next_frame(link)
                if frame is None:
                    link.wake.clear()
                    await link.wake.wait()
                else:
                    async with asyncio.timeout(SEND_S):
                        await socket.send_bytes(frame)
            await socket.close(code=WSCloseCode.SERVICE_RESTART, message=b"engine facts changed, connect again")
        except TimeoutError:
            log.warning("router takes nothing, disconnecting", extra={"router": link.name})
            if transport is not None:
                transport.abort()  # a close handshake would wait behind what the router does not read
        except (ConnectionError, RuntimeError):
            log.debug("router went away while being written to")
        except Exception as error:  # noqa: BLE001  that router's stream ends, so that it comes back; unwritten it would hang
            log_defect(log, "a router could not be told", error)
            self._publisher.broken()
            if transport is not None:
                transport.abort()

    async def _close_streams(self, app: web.Application) -> None:
        async with asyncio.TaskGroup() as group:
            for socket in list(self._sockets):
                group.create_task(socket.close(code=WSCloseCode.GOING_AWAY, message=b"agent is stopping"))


async def _sign(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = names.SERVER


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
