"""From a request's head and body to an Exchange: whose it is, what it says, what of it engines get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from aiohttp import hdrs, web
from multidict import CIMultiDict

from prefixpool import names
from prefixpool.errors import RequestError
from prefixpool_router import headers
from prefixpool_router.auth import ALLOW_POLICY, Grant
from prefixpool_router.credentials import Credentials
from prefixpool_router.dispatch_types import RoutedRequest
from prefixpool_router.exchange import Arrived, Exchange
from prefixpool_router.limits import BodyLimits, BodyShare, check_declared, read_body
from prefixpool_router.paths import Api
from prefixpool_router.request import check_store, edit, parse_object
from prefixpool_router.settings import RouterSettings

_KEPT_BYTES: Final = 1 << 20  # a body that is not read is kept up to this length, so that another replica can be tried

_STEERING: Final = "kv_transfer_params"


class _Body(NamedTuple):
    raw: bytes | None  # None: passed on as it arrives
    parsed: Mapping[str, Any] | None = None
    salt: str = ""
    withhold: bool = False


class Intake:
    """Reads and checks requests; holds nothing of them."""

    def __init__(self, credentials: Credentials, settings: RouterSettings) -> None:
        self._credentials = credentials
        self._limits = BodyLimits(settings.max_body_bytes, settings.body_timeout_s)
        self._policy_header = settings.policy_header
        self._engine_store = settings.engine_store

    async def read(self, arrived: Arrived, share: BodyShare) -> Exchange:
        """Raises RequestError: 401, 408, 413, 415, 429, or 400 for a body that is not as it should be. The Exchange may hold
        what was taken from `share`."""
        request = arrived.request
        grant = self._credentials.check(request.headers)
        arrived.visit.scope = grant.scope
        body = await self._read_body(arrived, grant, share)
        routed = RoutedRequest(
            path=arrived.route.path,
            body=body.parsed if arrived.route.parsed else None,
            body_bytes=body.raw or b"",
            scope_salt=body.salt,
            session=_session(request, body.parsed),
            tenant=grant.scope,
            reserve_s=grant.reserve_s,
            steers_loading=_STEERING in grant.allow and _STEERING in (body.parsed or ()),
            policy=self._policy(request, grant),
            request_id=arrived.request_id,
        )
        fields = self._engine_headers(arrived, grant, body)
        return Exchange(arrived, routed, fields, body=body.raw, withhold=body.withhold, limits=self._limits)

    async def _read_body(self, arrived: Arrived, grant: Grant, share: BodyShare) -> _Body:
        request, api = arrived.request, arrived.route.api
        check_declared(request, self._limits)
        if not arrived.route.parsed and not self._must_be_salted(request):
            if _short(request):
                return _Body(await read_body(request, self._limits, share))
            return _Body(None)
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise RequestError(415, "Request bodies must not be compressed.")
        raw = await read_body(request, self._limits, share)
        parsed = parse_object(raw)
        if api is Api.RESPONSES and not self._engine_store:
            check_store(parsed)
        salt = self._credentials.salt(grant, parsed.get("cache_salt"))
        edited = edit(api, raw, parsed, allowed=grant.allow, salt=salt)
        return _Body(edited.raw, parsed, salt, edited.usage_added)

    def _must_be_salted(self, request: web.BaseRequest) -> bool:
        """Even on a path that we don't know, no client may pick its own salt while scopes are kept apart by it."""
        form = request.headers.get("Content-Type", "").lower().startswith("multipart/")
        return self._credentials.salted and request.body_exists and not form

    def _policy(self, request: web.BaseRequest, grant: Grant) -> str:
        if self._policy_header or ALLOW_POLICY in grant.allow:
            return request.headers.get(names.H_POLICY, "")
        return ""

    def _engine_headers(self, arrived: Arrived, grant: Grant, body: _Body) -> CIMultiDict[str]:
        fields = headers.for_engine(
            arrived.request.headers,
            api=arrived.route.api,
            request_id=arrived.request_id,
            engine_key=self._credentials.engine_key,
            priority_allowed="priority" in grant.allow,
        )
        if body.raw is None and arrived.request.content_length is not None:
            fields[hdrs.CONTENT_LENGTH] = str(arrived.request.content_length)
        return fields


def _short(request: web.BaseRequest) -> bool:
    if not request.body_exists:
        return True
    return request.content_length is not None and request.content_length <= _KEPT_BYTES


def _session(request: web.BaseRequest, parsed: Mapping[str, Any] | None) -> str:
    given = request.headers.get(names.H_SESSION) or (parsed or {}).get("session_id")
    return given if isinstance(given, str) else ""
