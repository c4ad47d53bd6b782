"""EndpointSlices of one Service over the Kubernetes API: list and watch, with deadlines, and errors for people.

Only the current picture matters here, so whatever goes wrong is cured by listing anew; nothing is resumed after an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import aiohttp
import msgspec
from yarl import URL

from prefixpool.errors import PrefixpoolError
from prefixpool_router.endpoint_slices import SERVICE_LABEL, EndpointSlice, Metadata

_PAGE: Final = "100"  # slices in one answer; a slice has at most 100 endpoints unless configured otherwise
_MAX_LINE_BYTES: Final = 16 << 20
_QUOTED_CHARS: Final = 200
_GONE: Final = 410
_ROLE: Final = "a Role with apiGroups [discovery.k8s.io], resources [endpointslices], verbs [get, list, watch]"


class ApiServer(NamedTuple):
    """Where a Service's EndpointSlices are asked for. `ca_file` "": the system's certificates."""

    url: str
    namespace: str
    service: str
    token_file: Path
    ca_file: str


class Deadlines(NamedTuple):
    """In seconds. `watch`: after which the server ends a watch in order; `silence`: a watch without even a bookmark."""

    answer: float = 10.0
    watch: float = 300.0
    silence: float = 90.0  # API servers send a bookmark about every minute


class ApiError(PrefixpoolError):
    """What is wrong, with whom, and what to do."""


class StaleError(ApiError):
    """Nothing is wrong, but what is known may be old: list again."""


class Listing(NamedTuple):
    """All slices by name, as of a version from which to watch."""

    slices: dict[str, EndpointSlice]
    version: str


class Change(NamedTuple):
    """One event of a watch. `slice` None: only the version moved on (a bookmark)."""

    slice: EndpointSlice | None
    version: str
    deleted: bool = False


class _Page(msgspec.Struct, frozen=True):
    metadata: Metadata = Metadata()
    items: tuple[EndpointSlice, ...] = ()


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct, frozen=True):
    message: str = ""
    code: int = 0


class _Bookmark(msgspec.Struct, frozen=True):
    metadata: Metadata


class SliceApi:
    """One HTTP session; an async context manager. Raises ApiError for whatever goes wrong."""

    def __init__(self, server: ApiServer, deadlines: Deadlines) -> None:
        self._server = server
        self._deadlines = deadlines
        self._url = URL(server.url.rstrip("/")) / f"apis/discovery.k8s.io/v1/namespaces/{server.namespace}/endpointslices"
        self._select = {"labelSelector": f"{SERVICE_LABEL}={server.service}"}

    async def __aenter__(self) -> Self:
        trusted: ssl.SSLContext | bool = True
        if self._url.scheme == "https":
            trusted = await asyncio.to_thread(_trusted, self._server.ca_file)
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=trusted), timeout=aiohttp.ClientTimeout(total=None)
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def list(self) -> Listing:
        """All pages."""
        slices: dict[str, EndpointSlice] = {}
        more = {"limit": _PAGE}
        while True:
            page = await self._page(more)
            slices.update((each.metadata.name, each) for each in page.items)
            if not page.metadata.continue_:
                return Listing(slices, page.metadata.resource_version)
            more = {"limit": _PAGE, "continue": page.metadata.continue_}

    async def watch(self, version: str) -> AsyncGenerator[Change, None]:
        """What changed since then; ends when the server ends it in order. Raises StaleError if then was too long ago."""
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(max(1, round(self._deadlines.watch))),
        }
        async with self._opened("watch", query) as answer:
            async for line in self._lines(answer.content):
                yield _change(line)

    async def _page(self, query: dict[str, str]) -> _Page:
        try:
            async with asyncio.timeout(self._deadlines.answer), self._opened("list", query) as answer:
                return msgspec.json.decode(await answer.read(), type=_Page)
        except TimeoutError as error:
            raise ApiError(f"list: {self._server.url} did not answer within {self._deadlines.answer:g} s") from error

    @contextlib.asynccontextmanager
    async def _opened(self, verb: str, query: dict[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """The head of an answer has come, and it is 200."""
        url, token = self._url.with_query({**self._select, **query}), self._token()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(self._deadlines.answer):
                    answer = await stack.enter_async_context(self._http.get(url, headers=headers, allow_redirects=False))
                    if answer.status != 200:
                        raise self._refusal(verb, answer.status, await answer.read())
                yield answer
        except TimeoutError as error:
            raise ApiError(f"{verb}: {self._server.url} did not answer within {self._deadlines.answer:g} s") from error
        except (aiohttp.ClientError, OSError, UnicodeError) as error:  # the last: a host that no name can be
            raise ApiError(f"{verb}: no connection to {self._server.url}: {str(error) or type(error).__name__}") from error
        except msgspec.DecodeError as error:
            raise ApiError(f"{verb}: {self._server.url} sent no EndpointSlices: {error}") from error

    async def _lines(self, content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
        rest = b""
        while chunk := await self._chunk(content):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in filter(None, lines):
                yield line
            if len(rest) > _MAX_LINE_BYTES:
                raise ApiError(f"watch: an event of more than {_MAX_LINE_BYTES} bytes")

    async def _chunk(self, content: aiohttp.StreamReader) -> bytes:
        """b"" at the end."""
        try:
            async with asyncio.timeout(self._deadlines.silence):
                return await content.readany()
        except TimeoutError as error:
            raise StaleError(f"watch: nothing heard for {self._deadlines.silence:g} s") from error

    def _token(self) -> str:
        try:
            return self._server.token_file.read_text().strip()
        except (OSError, UnicodeError):
            return ""  # a local proxy wants none; others will say 401

    def _refusal(self, verb: str, status: int, body: bytes) -> ApiError:
        server = self._server
        if status == _GONE:
            return StaleError(f"{verb}: the version is too old")
        if status == 401:
            found = "is not accepted" if self._token() else "cannot be read"
            return ApiError(f"{verb}: {server.url} answers 401: the token in {server.token_file} {found}")
        if status == 403:
            missing = f"the ServiceAccount needs {_ROLE} in namespace {server.namespace}, and a RoleBinding to it"
            return ApiError(f"{verb}: not allowed (403): {missing}")
        return ApiError(f"{verb}: {server.url} answers {status}: {_message(body)}")


def _trusted(ca_file: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise ApiError(f"--kubernetes-ca-file={ca_file}: {error.strerror or error}") from error


def _change(line: bytes) -> Change:
    event = msgspec.json.decode(line, type=_Event)
    match event.type:
        case "ADDED" | "MODIFIED" | "DELETED":
            found = msgspec.json.decode(event.object, type=EndpointSlice)
            return Change(found, found.metadata.resource_version, event.type == "DELETED")
        case "BOOKMARK":
            return Change(None, msgspec.json.decode(event.object, type=_Bookmark).metadata.resource_version)
        case "ERROR":
            status = msgspec.json.decode(event.object, type=_Status)
            kind = StaleError if status.code == _GONE else ApiError
            raise kind(f"watch: {status.code}: {status.message[:_QUOTED_CHARS]}")
        case other:
            raise ApiError(f"watch: unknown event {other[:_QUOTED_CHARS]!r}")


def _message(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_Status).message[:_QUOTED_CHARS]
    except msgspec.DecodeError:
        return body[:_QUOTED_CHARS].decode(errors="replace")
