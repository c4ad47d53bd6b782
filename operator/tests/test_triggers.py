"""Watching: started again when it ends by itself, ended with its owner. What kopf does is tested on a real API server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import kopf
import pytest
from kubernetes.aio.client import Configuration
from prometheus_client import CollectorRegistry

from prefixpool_operator import kube, triggers
from prefixpool_operator.changes import EVERYWHERE
from prefixpool_operator.controller import PoolKey
from prefixpool_operator.kube import NotFoundError
from prefixpool_operator.metrics import OperatorMetrics
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

    monkeypatch.setattr(kopf, "operator", operator)
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

    monkeypatch.setattr(kopf, "operator", operator)
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

    monkeypatch.setattr(kopf, "operator", operator)
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

    monkeypatch.setattr(kopf, "operator", operator)
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

    monkeypatch.setattr(kopf, "operator", operator)
    monkeypatch.setattr(triggers, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(triggers, "_LOOK_S", 0.01)
    running = asyncio.create_task(made(CollectorRegistry(), known=known).run())

    async def second_life() -> bool:
        return len(lives) == 2

    await eventually(second_life, what="the other namespace is watched, too")
    assert lives == [(False, ("a",)), (False, ("a", "b"))]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
