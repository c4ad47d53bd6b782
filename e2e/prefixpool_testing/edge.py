"""A router's HTTP edge before scripted backends; its dispatcher takes replicas in order and notes what it is told."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import msgspec
from prometheus_client import CollectorRegistry

from prefixpool.errors import RequestError
from prefixpool_router.app import Edge
from prefixpool_router.credentials import Credentials
from prefixpool_router.dispatch_types import NotYetError, Outcome, RoutedRequest
from prefixpool_router.metrics import EdgeMetrics
from prefixpool_router.settings import RouterSettings
from prefixpool_testing.backend import Backend


class FakeDispatch:
    """One attempt. Like the real one, only the first finish or abandon counts; the rest are kept in `ignored`."""

    predicted_tokens = 32
    reason = "warm"
    lost = False

    def __init__(
        self, replica: str, engine_url: str, request: RoutedRequest, kv_transfer_params: Mapping[str, Any] | None = None
    ) -> None:
        self.kv_transfer_params = kv_transfer_params or {}
        self.replica = replica
        self.engine_url = engine_url
        self.request = request
        self.id = request.request_id
        self.first_bytes = 0
        self.outcome: Outcome | None = None
        self.abandoned: tuple[str, bool] | None = None
        self.ended = asyncio.Event()

    def first_byte(self) -> None:
        self.first_bytes += 1

    def finish(self, outcome: Outcome) -> None:
        if not self.ended.is_set():
            self.outcome = outcome
            self.ended.set()

    def abandon(self, why: str, *, replica_down: bool) -> None:
        if not self.ended.is_set():
            self.abandoned = (why, replica_down)
            self.ended.set()


class FakeDispatcher:
    """Chooses the first replica that is not excluded; `open_before` notes how many bookings were open at each dispatch."""

    def __init__(self, engines: dict[str, str]) -> None:
        self.engines = engines
        self.dispatches: list[FakeDispatch] = []
        self.open_before: list[int] = []
        self.refusal: RequestError | None = None
        self.ready = True
        self.full: set[str] = set()  # replicas without a free place
        self.told: Mapping[str, Any] = {}  # what engines are told of loading
        self.wake: Callable[[int], None] = lambda places: None

    def dispatch(self, request: RoutedRequest, exclude: frozenset[str] = frozenset()) -> FakeDispatch:
        if self.refusal is not None:
            raise self.refusal
        if self.full >= self.engines.keys():
            raise NotYetError
        self.open_before.append(sum(not each.ended.is_set() for each in self.dispatches))
        for replica, url in self.engines.items():
            if replica not in exclude and replica not in self.full:
                self.dispatches.append(FakeDispatch(replica, url, request, self.told))
                return self.dispatches[-1]
        raise RequestError(503, "No replica is ready.", retry_after_s=1)

    def when_room(self, wake: Callable[[int], None]) -> None:
        self.wake = wake


class EdgeUnderTest:
    """What tests touch: `client` speaks to the edge, `url` is its address."""

    def __init__(
        self,
        edge: Edge,
        dispatcher: FakeDispatcher,
        backends: list[Backend],
        client: aiohttp.ClientSession,
        registry: CollectorRegistry,
    ) -> None:
        self.edge = edge
        self.dispatcher = dispatcher
        self.backends = backends
        self.backend = backends[0]
        self.client = client
        self.registry = registry
        self._writers: list[asyncio.StreamWriter] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.edge.port}"

    @property
    def last(self) -> FakeDispatch:
        return self.dispatcher.dispatches[-1]

    def post(self, path: str, body: Any, *, headers: dict[str, str] | None = None) -> Any:
        """A request context, as aiohttp's; `body`: bytes as they are, anything else as JSON."""
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        fields = {"Content-Type": "application/json", **(headers or {})}
        return self.client.post(self.url + path, data=io.BytesIO(raw), headers=fields)

    def metric(self, name: str, **labels: str) -> float | None:
        """Value of one sample."""
        return self.registry.get_sample_value(f"prefixpool_router_{name}", labels)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A bare connection, for what no client library would send."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.edge.port)
        self._writers.append(writer)
        return reader, writer

    async def disconnect(self) -> None:
        """Break all bare connections."""
        for writer in self._writers:
            writer.transport.abort()
            with contextlib.suppress(OSError):  # however it had ended before
                await writer.wait_closed()


@asynccontextmanager
async def running_edge(replicas: int = 1, *, shared: bool = False, **settings: Any) -> AsyncIterator[EdgeUnderTest]:
    """An edge with `replicas` scripted backends p-0, p-1, …; `settings` as of RouterSettings."""
    async with AsyncExitStack() as stack:
        backends = [await stack.enter_async_context(Backend()) for _ in range(replicas)]
        dispatcher = FakeDispatcher({f"p-{i}": backend.url for i, backend in enumerate(backends)})
        chosen = RouterSettings(**{"port": 0, "files_interval_s": 0.02, **settings})
        registry = CollectorRegistry()
        edge = Edge(chosen, dispatcher, EdgeMetrics(registry), Credentials(chosen), ready=lambda: dispatcher.ready)
        await edge.start(shared=shared)
        stack.push_async_callback(edge.stop, 0.2)
        client = await stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
        under_test = EdgeUnderTest(edge, dispatcher, backends, client, registry)
        stack.push_async_callback(under_test.disconnect)
        yield under_test


async def until(condition: Callable[[], object], *, timeout: float = 2.0) -> None:
    """For what nobody announces. Raises TimeoutError."""
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110 -- see above
            await asyncio.sleep(0.002)
