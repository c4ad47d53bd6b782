"""Watching: started again when it ends by itself, ended with its owner. What kopf does is tested on a real API server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, NamedTuple

import kopf
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import Configuration
from prometheus_client import CollectorRegistry

from prefixpool_operator import kube, triggers
from prefixpool_operator.changes import EVERYWHERE
from prefixpool_operator.controller import PoolKey
from prefixpool_operator.kube import NotFoundError, Resource
from prefixpool_operator.metrics import OperatorMetrics
from prefixpool_operator.observed import Raw
from prefixpool_operator.triggers import Triggers
from prefixpool_testing.eventually import eventually


async def load() -> Configuration:
    return Configuration(host="http://127.0.0.1:9")


async def known() -> tuple[str, ...]:
    """The cluster has InferencePools."""
    return EVERYWHERE


def made(
    registry: CollectorRegistry,
    wake: Callable[[PoolKey], None] = lambda key: None,
    known: Callable[[], Awaitable[tuple[str, ...]]] = known,
) -> Triggers:
    return Triggers(wake, load, known, kinds=(kube.POD,), timeout_s=1, metrics=OperatorMetrics(registry))


def lives_as(monkeypatch: pytest.MonkeyPatch, life: Callable[..., Coroutine[Any, Any, None]]) -> None:
    """Instead of kopf's tasks there is this one."""

    async def spawn_tasks(**settings: Any) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(life(**settings))]

    monkeypatch.setattr(kopf, "spawn_tasks", spawn_tasks)


async def until_stopped(stop_flag: threading.Event, **_: Any) -> None:
    await asyncio.to_thread(stop_flag.wait)


async def breaks(stop_flag: threading.Event, **_: Any) -> None:
    """As kopf does: a thread goes on waiting for the flag."""
    waiting = asyncio.get_running_loop().run_in_executor(None, stop_flag.wait)
    await asyncio.wait({waiting}, timeout=0.01)
    raise RuntimeError("the watch is gone")


async def test_watching_that_breaks_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lives: list[str] = []

    async def operator(**settings: Any) -> None:
        lives.append(threading.current_thread().name)
        await (breaks if len(lives) < 3 else until_stopped)(**settings)

    lives_as(monkeypatch, operator)
    monkeypatch.setattr(triggers, "_FIRST_PAUSE_S", 0.01)
    registry = CollectorRegistry()
    running = asyncio.create_task(made(registry).run())

    async def third_life() -> bool:
        return len(lives) == 3

    await eventually(third_life, what="it is started a third time")
    assert registry.get_sample_value("prefixpool_operator_watch_restarts_total") == 2
    assert threading.current_thread().name not in lives, "kopf has a thread and a loop of its own"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_pools_are_watched_again_when_their_crd_was_deleted_and_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """kopf asks once which kinds there are: if it began while pools are missing, it would never see any."""
    there = [True, False, False, True]
    lives: list[int] = []

    async def known() -> tuple[str, ...]:
        if not there.pop(0):
            raise NotFoundError("the server could not find the requested resource")
        return EVERYWHERE

    async def operator(**settings: Any) -> None:
        lives.append(len(there))
        await (breaks if len(lives) < 2 else until_stopped)(**settings)

    lives_as(monkeypatch, operator)
    monkeypatch.setattr(triggers, "_FIRST_PAUSE_S", 0.01)
    running = asyncio.create_task(made(CollectorRegistry(), known=known).run())

    async def second_life() -> bool:
        return len(lives) == 2

    await eventually(second_life, what="it is started again")
    assert lives == [3, 0], "only while pools are known"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_watching_ends_with_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    async def operator(**settings: Any) -> None:
        loop.call_soon_threadsafe(begun.set)
        await until_stopped(**settings)
        ended.set()

    lives_as(monkeypatch, operator)
    running = asyncio.create_task(made(CollectorRegistry()).run())
    await begun.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert ended.is_set()


async def test_events_wake_the_pool_whose_label_they_bear(monkeypatch: pytest.MonkeyPatch) -> None:
    woken: asyncio.Queue[PoolKey] = asyncio.Queue()
    here = threading.current_thread()

    def wake(key: PoolKey) -> None:
        assert threading.current_thread() is here, "in the controller's loop"
        woken.put_nowait(key)

    async def operator(registry: kopf.OperatorRegistry, **settings: Any) -> None:
        handlers = {handler.id: handler.fn for handler in registry._watching.get_all_handlers()}
        assert not registry._changing.get_all_handlers(), "these would write annotations"
        assert not registry._spawning.get_all_handlers(), "these would write finalizers"
        unlabelled = {"metadata": {"namespace": "ns", "name": "theirs"}}
        labelled = {"metadata": {"namespace": "ns", "name": "p-0", "labels": {"prefixpool.dev/pool": "p"}}}
        pool = {"metadata": {"namespace": "ns", "name": "q"}}
        for name, body in (("pods", unlabelled), ("pods", labelled), ("inferencepools", pool)):
            handler: Any = handlers[name]
            await handler(body=body)
        await until_stopped(**settings)

    lives_as(monkeypatch, operator)
    running = asyncio.create_task(made(CollectorRegistry(), wake).run())
    assert await woken.get() == PoolKey("ns", "p")
    assert await woken.get() == PoolKey("ns", "q")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_kopf_logs_in_as_the_rest_of_the_operator_does(monkeypatch: pytest.MonkeyPatch) -> None:
    async def load() -> Configuration:
        found = Configuration(host="https://10.0.0.1")
        found.api_key["BearerToken"] = "Bearer sesame"
        found.ssl_ca_cert = "/ca.crt"
        return found

    metrics = OperatorMetrics(CollectorRegistry())
    info = await Triggers(lambda key: None, load, known, kinds=(), timeout_s=1, metrics=metrics)._login()
    assert (info.server, info.ca_path, info.scheme, info.token) == ("https://10.0.0.1", "/ca.crt", "Bearer", "sesame")


async def test_a_namespace_that_may_not_be_read_is_not_watched_until_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """kopf ends altogether where it may not watch; so one deleted namespace ended the watching of all."""
    readable = ["a"]
    lives: list[tuple[bool, tuple[str, ...]]] = []

    async def known() -> tuple[str, ...]:
        return tuple(readable)

    async def operator(clusterwide: bool, namespaces: tuple[str, ...], **settings: Any) -> None:
        lives.append((clusterwide, namespaces))
        readable[:] = ["a", "b"]
        await until_stopped(**settings)

    lives_as(monkeypatch, operator)
    monkeypatch.setattr(triggers, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(triggers, "_LOOK_S", 0.01)
    running = asyncio.create_task(made(CollectorRegistry(), known=known).run())

    async def second_life() -> bool:
        return len(lives) == 2

    await eventually(second_life, what="the other namespace is watched, too")
    assert lives == [(False, ("a",)), (False, ("a", "b"))]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


NAMESPACES = Resource("v1", "Namespace", "namespaces")  # without this kind kopf does not begin


class StubbornServer:
    """An API server that lists no objects, refuses one watch of pools, and says nothing to all the others."""

    def __init__(self, kinds: tuple[Resource, ...]) -> None:
        self.kinds = kinds
        self.listed: list[str] = []
        self.asking = 0  # watches without an answer
        self.refuse = asyncio.Event()
        self.undiscovered: set[str] = set()

    async def answer(self, request: web.Request) -> web.Response:
        *_, last = request.path.split("/")
        if "watch" in request.query:
            return await self._watch(last)
        if any(last == kind.plural for kind in self.kinds):
            self.listed.append(last)
            return web.json_response({"kind": "List", "metadata": {"resourceVersion": "1"}, "items": []})
        return web.json_response(self._discovered(request.path))

    async def _watch(self, plural: str) -> web.Response:
        self.asking += 1
        try:
            await (self.refuse if plural == kube.POOL.plural else asyncio.Event()).wait()
        finally:
            self.asking -= 1
        self.refuse.clear()
        return web.json_response({"kind": "Status", "code": 410, "reason": "Expired"}, status=410)

    def _discovered(self, path: str) -> Raw:
        versions = sorted({(kind.group, kind.api_version.rpartition("/")[2]) for kind in self.kinds if kind.group})
        if path == "/api":
            return {"versions": ["v1"]}
        if path == "/apis":
            listed = [{"groupVersion": f"{group}/{version}", "version": version} for group, version in versions]
            return {
                "groups": [
                    {"name": group, "versions": [one], "preferredVersion": one}
                    for (group, _), one in zip(versions, listed, strict=True)
                ]
            }
        found = path.removeprefix("/apis/").removeprefix("/api/")
        return {
            "resources": [
                {"name": one.plural, "singularName": "", "kind": one.kind, "namespaced": True, "verbs": ["list", "watch"]}
                for one in (*self.kinds, NAMESPACES)
                if one.api_version == found and one.plural not in self.undiscovered
            ]
        }


class Watched(NamedTuple):
    server: StubbornServer
    registry: CollectorRegistry

    async def until(self, lists: int) -> None:
        async def check() -> bool:
            server = self.server
            return server.listed.count(kube.POOL.plural) == lists and server.asking == len(server.kinds)

        await eventually(check, what=f"all kinds are watched, after {lists} lists of pools")

    @property
    def restarts(self) -> float:
        return self.registry.get_sample_value("prefixpool_operator_watch_restarts_total") or 0.0


@pytest.fixture
async def watched(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    """kopf itself watches a server on loopback."""
    kinds = (kube.POD, *kube.CHILDREN)
    server, registry = StubbornServer((kube.POOL, *kinds)), CollectorRegistry()
    app = web.Application()
    app.add_routes([web.get("/{path:.*}", server.answer)])
    monkeypatch.setattr(triggers, "_FIRST_PAUSE_S", 0.01)
    async with TestServer(app) as listening:

        async def here() -> Configuration:
            return Configuration(host=str(listening.make_url("")))

        watching = Triggers(lambda key: None, here, known, kinds=kinds, timeout_s=20, metrics=OperatorMetrics(registry))
        running = asyncio.create_task(watching.run())
        yield Watched(server, registry)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_one_watch_was_refused_while_others_were_asking_and_nothing_was_watched_any_more(watched: Watched) -> None:
    """kopf then waited for ever for watches that had taken their cancellation for something else."""
    await watched.until(lists=1)
    watched.server.refuse.set()
    await watched.until(lists=2)
    assert watched.restarts == 1


async def test_a_kind_that_discovery_told_of_late_was_never_watched(watched: Watched) -> None:
    """A list of pools is answered before all that tell of kinds know them."""
    watched.server.undiscovered.add(kube.POOL.plural)

    async def noticed() -> bool:
        return watched.restarts > 0

    await eventually(noticed, what="that watching is not whole")
    watched.server.undiscovered.clear()
    await watched.until(lists=1)


async def test_watching_starts_again_beside_what_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    lives: list[int] = []
    let_go = threading.Event()

    async def deaf() -> None:
        while not let_go.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    async def operator(**settings: Any) -> None:
        lives.append(len(lives))
        if len(lives) > 1:
            await until_stopped(**settings)
        hearing = asyncio.create_task(deaf(), name="deaf")
        await asyncio.wait({hearing}, timeout=0.01)
        raise RuntimeError("the watch is gone")

    lives_as(monkeypatch, operator)
    for name in ("_FIRST_PAUSE_S", "_STOP_S", "_CANCEL_S"):
        monkeypatch.setattr(triggers, name, 0.01)
    running = asyncio.create_task(made(CollectorRegistry()).run())

    async def second_life() -> bool:
        return len(lives) == 2

    await eventually(second_life, what="it is started again")
    let_go.set()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
