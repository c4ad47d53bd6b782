"""The part of a Kubernetes API server that knows EndpointSlices: list in pages, watch from a version, and its bad days."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import urlsplit

from aiohttp import web

NAMESPACE: Final = "models"
SERVICE: Final = "pool-replicas"
PATH: Final = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
_LABEL: Final = "kubernetes.io/service-name"

Object = dict[str, Any]


def endpoint(hostname: str, address: str = "10.0.0.1", *, uid: str = "", **conditions: bool) -> Object:
    """One pod. Its uid is its name unless told otherwise."""
    ready = {"ready": True, "serving": True, "terminating": False}
    reference = {"kind": "Pod", "name": hostname, "namespace": NAMESPACE, "uid": uid or f"uid-{hostname}"}
    return {"addresses": [address], "conditions": {**ready, **conditions}, "hostname": hostname, "targetRef": reference}


def endpoint_slice(
    name: str, *endpoints: Object, family: str = "IPv4", service: str = SERVICE, ports: Mapping[str, int] | None = None
) -> Object:
    """A slice of a Service, as its controller would write it."""
    ports = {"engine": 8100, "agent": 8101, "router": 8000} if ports is None else ports
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {_LABEL: service}},
        "addressType": family,
        "endpoints": list(endpoints),
        "ports": [{"name": port, "port": number, "protocol": "TCP"} for port, number in ports.items()],
    }


def slices_of(members: Mapping[str, tuple[str, str]], terminating: frozenset[str] = frozenset()) -> list[Object]:
    """A slice for each replica, from its engine's and its agent's URL: on one machine all have the same address."""
    found = []
    for name, urls in members.items():
        ports = {port: urlsplit(url).port or 0 for port, url in zip(("engine", "agent"), urls, strict=True)}
        found.append(endpoint_slice(name, endpoint(name, "127.0.0.1", terminating=name in terminating), ports=ports))
    return found


class FakeEndpointSlices:
    """One namespace. The attributes below are its bad days; they hold until they are set back."""

    def __init__(self, token: str = "") -> None:
        self.token = token
        self.status = 0  # of every answer; 0: none is forced
        self.slow = False  # no list is answered
        self.silent = False  # watches are accepted, and never hear anything
        self.forgetful = False  # watches from before now get 410, in the stream as the real one does
        self.curt = False  # watches end at once
        self.page_slices = 1000
        self.requests: list[Mapping[str, str]] = []
        self.url = ""
        self.watches = 0
        self._objects: dict[str, Object] = {}
        self._version = 100
        self._events: list[tuple[int, str, Object]] = []
        self._news = asyncio.Condition()
        self._generation = 0

    async def put(self, *slices: Object) -> None:
        """Create or replace."""
        for each in slices:
            kind = "MODIFIED" if each["metadata"]["name"] in self._objects else "ADDED"
            await self._record(kind, each)

    async def delete(self, name: str) -> None:
        await self._record("DELETED", self._objects[name])

    async def bookmark(self) -> None:
        async with self._news:
            self._version += 1
            self._events.append((self._version, "BOOKMARK", {"metadata": {"resourceVersion": str(self._version)}}))
            self._news.notify_all()

    async def drop_watches(self) -> None:
        """Their connections break."""
        async with self._news:
            self._generation += 1
            self._news.notify_all()

    async def start(self) -> None:
        """Listen; where it did before, if it did."""
        app = web.Application()
        app.router.add_get(PATH, self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        port = urlsplit(self.url).port or 0
        await web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """All connections end, too."""
        await self._runner.cleanup()

    async def _record(self, kind: str, found: Object) -> None:
        async with self._news:
            self._version += 1
            found = {**found, "metadata": {**found["metadata"], "resourceVersion": str(self._version)}}
            name = found["metadata"]["name"]
            if kind == "DELETED":
                del self._objects[name]
            else:
                self._objects[name] = found
            self._events.append((self._version, kind, found))
            self._news.notify_all()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append({**request.query, "authorization": request.headers.get("Authorization", "")})
        status = self.status or (401 if self.token and self.requests[-1]["authorization"] != f"Bearer {self.token}" else 0)
        if status:
            return web.json_response({"kind": "Status", "code": status, "message": "told so"}, status=status)
        return await (self._watch(request) if "watch" in request.query else self._list(request))

    async def _list(self, request: web.Request) -> web.Response:
        while self.slow:  # noqa: ASYNC110 -- until the client has had enough
            await asyncio.sleep(0.01)
        wanted = request.query["labelSelector"].removeprefix(f"{_LABEL}=")
        found = [each for _, each in sorted(self._objects.items()) if each["metadata"]["labels"][_LABEL] == wanted]
        start = int(request.query.get("continue", "0"))
        end = start + min(self.page_slices, int(request.query["limit"]))
        metadata = {"resourceVersion": str(self._version), **({"continue": str(end)} if end < len(found) else {})}
        return web.json_response({"kind": "EndpointSliceList", "metadata": metadata, "items": found[start:end]})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        generation, since = self._generation, int(request.query["resourceVersion"])
        response = web.StreamResponse()
        response.content_type = "application/json"
        await response.prepare(request)
        if self.curt:
            return response
        if self.forgetful:
            await response.write(_line("ERROR", {"kind": "Status", "code": 410, "message": "too old resource version"}))
            return response
        self.watches += 1
        try:
            async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                await self._tell(response, generation, since)
        except TimeoutError:
            return response
        finally:
            self.watches -= 1
        assert request.transport is not None
        request.transport.abort()
        return response

    async def _tell(self, response: web.StreamResponse, generation: int, since: int) -> None:
        """Until the watches are dropped."""
        while generation == self._generation:
            async with self._news:
                if not any(version > since for version, _, _ in self._events):
                    await self._news.wait()
            if generation != self._generation:
                return
            for version, kind, found in [event for event in self._events if event[0] > since]:
                since = version
                if not self.silent:
                    await response.write(_line(kind, found))


@asynccontextmanager
async def listening(api: FakeEndpointSlices) -> AsyncIterator[str]:
    """Its URL."""
    await api.start()
    try:
        yield api.url
    finally:
        await api.stop()


def _line(kind: str, found: Object) -> bytes:
    return json.dumps({"type": kind, "object": found}).encode() + b"\n"
