"""Metrics and health, beside the controller in its loop: a loop that no longer turns answers no probe."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from prefixpool import names


class Health(NamedTuple):
    """Each says why not; "" = all is well."""

    dead: Callable[[], str]  # the process should be restarted
    not_ready: Callable[[], str]


def health_app(health: Health, registry: CollectorRegistry) -> web.Application:
    """For whoever may reach the port: nothing secret is told."""

    async def healthz(_request: web.Request) -> web.Response:
        return _answer(health.dead(), status=500)

    async def readyz(_request: web.Request) -> web.Response:
        return _answer(health.not_ready(), status=503)

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.on_response_prepare.append(_sign)
    app.add_routes(
        [web.get(names.PATH_HEALTHZ, healthz), web.get(names.PATH_READYZ, readyz), web.get(names.PATH_METRICS, metrics)]
    )
    return app


async def _sign(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = names.SERVER


def _answer(why: str, *, status: int) -> web.Response:
    return web.Response(text=f"{why or 'ok'}\n", status=status if why else 200)
