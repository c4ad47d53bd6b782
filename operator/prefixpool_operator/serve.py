"""One operator process: builds everything, waits until it leads, works, and ends in order."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any, Final

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry

from prefixpool import __version__
from prefixpool.listening import bound
from prefixpool_operator import kube
from prefixpool_operator.agents import HttpAgents
from prefixpool_operator.apply import Applier
from prefixpool_operator.changes import EVERYWHERE, Changes
from prefixpool_operator.controller import Controller, Pace
from prefixpool_operator.election import Elector, LeadershipLostError, LeaseTerms
from prefixpool_operator.events import EventPoster
from prefixpool_operator.health import Health, health_app
from prefixpool_operator.inventory import ClusterInventory
from prefixpool_operator.kube_client import KubeClient, load_configuration
from prefixpool_operator.metrics import OperatorMetrics
from prefixpool_operator.observe import Observer
from prefixpool_operator.observed import Settings
from prefixpool_operator.plan import plan
from prefixpool_operator.reconcile import Reconciler
from prefixpool_operator.settings import OperatorSettings
from prefixpool_operator.triggers import Triggers

_log = logging.getLogger(__name__)

_SECRET_BYTES: Final = 32
_SHUTDOWN_S: Final = 2.0  # for answers of the health port


async def serve(settings: OperatorSettings, stop: asyncio.Event, *, abort: Callable[[int], None]) -> None:
    """Until `stop`. `abort` must end the process at once; it is called when the Lease is lost. SettingsError: no server."""
    registry = CollectorRegistry()
    metrics = OperatorMetrics(registry)
    identity = f"{socket.gethostname()}_{secrets.token_hex(4)}"
    async with AsyncExitStack() as stack:
        api = await _client(settings, identity, stack)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        own = await _client(settings, identity, stack)  # a Lease must not wait behind the work
        elector = _elector(settings, identity, own)
        metrics.leader.set_function(lambda: float(elector.leads()))
        inventory = ClusterInventory(api, fresh_s=settings.resync_s / 2, clock=time.monotonic)
        changes = _changes(settings, api, inventory)
        metrics.passed_over.set_function(lambda: len(changes.passed_over))
        reconciler = _reconciler(settings, api, inventory, session, elector, metrics)
        controller = _controller(settings, reconciler, changes, metrics)
        triggers = Triggers(
            controller.wake,
            load_configuration,
            changes.known,
            kinds=(*_children(settings), kube.POD),
            timeout_s=settings.api_timeout_s,
            metrics=metrics,
        )
        await _listen(stack, settings, health_app(_health(elector, controller), registry))
        if await _before(stop, elector.acquire()):
            await _lead(stop, elector, controller, triggers, abort)
            await elector.release()


async def _client(settings: OperatorSettings, identity: str, stack: AsyncExitStack) -> KubeClient:
    """An audit log shows which of several operators asked: by the name that the Lease has for its holder."""
    agent = f"prefixpool-operator/{__version__} ({identity})"
    client = KubeClient(await load_configuration(), timeout_s=settings.api_timeout_s, user_agent=agent)
    stack.push_async_callback(client.close)
    return client


async def _lead(
    stop: asyncio.Event, elector: Elector, controller: Controller, triggers: Triggers, abort: Callable[[int], None]
) -> None:
    async def hold() -> None:
        try:
            await elector.hold()
        except LeadershipLostError as error:
            _log.critical("leadership lost; this process ends", extra={"why": str(error)})
            abort(1)
        except Exception:  # noqa: BLE001 -- without anyone who renews it would live on, and never write again
            _log.critical("renewing the Lease broke; this process ends", exc_info=True)
            abort(1)

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(controller.run(), name="controller")
            await controller.synced.wait()  # watching needs the kinds to be there
            group.create_task(triggers.run(), name="triggers")

    holding = asyncio.create_task(hold(), name="lease")
    try:
        await _before(stop, work())
    finally:
        holding.cancel()
        await asyncio.wait({holding})


async def _before(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Whether `work` ended before `stop`; if not, it is cancelled."""
    stopping, working = asyncio.create_task(stop.wait()), asyncio.create_task(work)
    try:
        await asyncio.wait({stopping, working}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return True
        return False
    finally:
        stopping.cancel()
        working.cancel()
        await asyncio.wait({stopping, working})


def _elector(settings: OperatorSettings, identity: str, api: KubeClient) -> Elector:
    return Elector(
        api,
        namespace=settings.namespace,
        name=settings.lease_name,
        identity=identity,
        terms=LeaseTerms(settings.lease_duration_s, settings.lease_renew_s, settings.lease_retry_s),
        clock=time.monotonic,
        now=lambda: datetime.now(UTC),
        draw=random.random,
    )


def _changes(settings: OperatorSettings, api: KubeClient, inventory: ClusterInventory) -> Changes:
    kinds = (*_children(settings), kube.POD, kube.CLAIM)
    return Changes(api, inventory, namespaces=settings.namespaces or EVERYWHERE, kinds=kinds)


def _reconciler(
    settings: OperatorSettings,
    api: KubeClient,
    inventory: ClusterInventory,
    session: aiohttp.ClientSession,
    elector: Elector,
    metrics: OperatorMetrics,
) -> Reconciler:
    observer = Observer(
        api,
        inventory,
        HttpAgents(session, timeout_s=settings.agent_timeout_s),
        kinds=_children(settings),
        settings=Settings(
            worker_image=settings.worker_image,
            router_image=settings.router_image,
            operator_namespace=settings.namespace,
            render_rbac=settings.router_rbac,
            image_pull_policy=settings.image_pull_policy,
        ),
        now=time.time,
    )
    applier = Applier(api, leads=elector.leads, secret=lambda: secrets.token_urlsafe(_SECRET_BYTES), metrics=metrics)
    return Reconciler(observer, plan, applier, EventPoster(api, leads=elector.leads, now=time.time))


def _controller(
    settings: OperatorSettings, reconciler: Reconciler, changes: Changes, metrics: OperatorMetrics
) -> Controller:
    return Controller(
        reconciler.reconcile,
        changes.pools,
        pace=Pace(concurrency=settings.concurrency, resync_s=settings.resync_s),
        clock=time.monotonic,
        draw=random.random,
        metrics=metrics,
    )


def _children(settings: OperatorSettings) -> tuple[kube.Resource, ...]:
    return (*kube.CHILDREN, *(kube.RBAC_CHILDREN if settings.router_rbac else ()))


def _health(elector: Elector, controller: Controller) -> Health:
    """One that waits to lead is ready: it does all that is asked of it."""

    def not_ready() -> str:
        if not elector.leads():
            return elector.problem
        return "" if controller.synced.is_set() else controller.unsynced

    return Health(dead=lambda: controller.stale() if elector.leads() else "", not_ready=not_ready)


async def _listen(stack: AsyncExitStack, settings: OperatorSettings, app: web.Application) -> None:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_S)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    for sock in bound(settings.host, settings.port):
        await web.SockSite(runner, sock).start()
    _log.info("metrics and health", extra={"host": settings.host, "port": runner.addresses[0][1]})
