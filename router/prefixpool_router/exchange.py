"""One request of a client, read and checked: all that forwarding needs to know."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

from aiohttp import web
from multidict import CIMultiDict

from prefixpool.errors import Dialect, RequestError
from prefixpool_router.access_log import Visit
from prefixpool_router.dispatch_types import RoutedRequest
from prefixpool_router.engine_call import EngineRequest
from prefixpool_router.limits import BodyLimits, arriving
from prefixpool_router.paths import Route
from prefixpool_router.request import with_members


class Arrived(NamedTuple):
    """The head of a request, before anything was believed."""

    request: web.BaseRequest
    route: Route
    request_id: str
    started_s: float  # loop time
    closing: bool  # the router drains
    visit: Visit


class Exchange:
    """Owned by the handler of one request. `body` None: it was not read and is passed on as it arrives, once."""

    def __init__(
        self,
        arrived: Arrived,
        routed: RoutedRequest,
        headers: CIMultiDict[str],
        *,
        body: bytes | None,
        withhold: bool,
        limits: BodyLimits,
    ) -> None:
        self.request = arrived.request
        self.api = arrived.route.api
        self.visit = arrived.visit
        self.routed = routed
        self._headers = headers  # for the engine
        self.withhold = withhold  # it was the router that asked for the usage chunk, not the client
        self.dialect = Dialect.of_path(routed.path)
        self.repeatable = True  # False once a body that nobody kept is on its way to an engine
        self.refusal: RequestError | None = None  # what was wrong with a body that was being passed on
        self._body = body
        self._closing = arrived.closing
        self._started_s = arrived.started_s
        self._limits = limits

    def engine_request(self, kv_transfer_params: Mapping[str, Any]) -> EngineRequest:
        """For one attempt. `kv_transfer_params`: `Dispatch`'s, which says nothing about bodies that were not read."""
        body = self._passing() if self._body is None else self._body
        if kv_transfer_params and isinstance(body, bytes):
            body = with_members(body, {"kv_transfer_params": kv_transfer_params})
        return EngineRequest(self.request.method, self.request.raw_path, self._headers, body)

    def age_s(self) -> float:
        return asyncio.get_running_loop().time() - self._started_s

    def announce_close(self, response: web.StreamResponse) -> None:
        """While the router drains, every answer asks the client to connect anew."""
        if self._closing:
            response.force_close()

    def abort(self) -> None:
        """Cut the client off."""
        if self.request.transport is not None:
            self.request.transport.abort()

    async def _passing(self) -> AsyncIterator[bytes]:
        try:
            async for piece in arriving(self.request, self._limits):
                self.repeatable = False
                yield piece
        except RequestError as error:
            self.refusal = error
            raise
