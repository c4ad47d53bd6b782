"""The admin port: metrics, health, state, explain. Never beside `/v1`, and never in a client's reach.

The same application tells of one process (over its port, or a unix socket for its parent) and of all workers together:
what differs is who answers, the `Telling`.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest

from prefixpool import names
from prefixpool_router.explain import Explanation
from prefixpool_router.state import StateReport

PATH_STATE: Final = "/state"
PATH_EXPLAIN: Final = "/explain"
DEFAULT_DECISIONS: Final = 20


class Readiness(NamedTuple):
    """Whether clients should come here, and why (not)."""

    ready: bool
    why: str


class Explanations(msgspec.Struct, frozen=True):
    """`/explain`, newest first."""

    decisions: list[Explanation]


class Telling(Protocol):
    """Who knows. Answers within a few seconds, or raises TimeoutError."""

    async def readiness(self) -> Readiness: ...
    async def state(self) -> StateReport: ...
    async def explain(self, count: int, request_id: str) -> Explanations: ...
    async def metrics(self) -> bytes: ...


def admin_app(telling: Telling) -> web.Application:
    """`/healthz` answers for as long as the event loop turns."""
    handlers = _Handlers(telling)
    app = web.Application()
    app.on_response_prepare.append(_sign)
    app.add_routes(
        [
            web.get(names.PATH_HEALTHZ, handlers.healthz),
            web.get(names.PATH_READYZ, handlers.readyz),
            web.get(names.PATH_METRICS, handlers.metrics),
            web.get(PATH_STATE, handlers.state),
            web.get(PATH_EXPLAIN, handlers.explain),
        ]
    )
    return app


async def _sign(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = names.SERVER


def exposition(registry: CollectorRegistry) -> bytes:
    """Prometheus text format."""
    return generate_latest(registry)


class _Handlers:
    def __init__(self, telling: Telling) -> None:
        self._telling = telling

    async def healthz(self, _request: web.Request) -> web.Response:
        return _json({"alive": True})

    async def readyz(self, _request: web.Request) -> web.Response:
        ready, why = await self._telling.readiness()
        return _json({"ready": ready, "why": why}, status=200 if ready else 503)

    async def metrics(self, _request: web.Request) -> web.Response:
        body = await self._telling.metrics()
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def state(self, _request: web.Request) -> web.Response:
        return _json(await self._telling.state())

    async def explain(self, request: web.Request) -> web.Response:
        raw = request.query.get("n", str(DEFAULT_DECISIONS))
        if not raw.isascii() or not raw.isdigit() or len(raw) > 6:
            return _json({"error": f"n={raw!r}: expected a whole number of decisions"}, status=400)
        return _json(await self._telling.explain(int(raw), request.query.get("request_id", "")))


def _json(value: object, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
