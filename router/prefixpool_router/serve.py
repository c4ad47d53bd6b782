"""One router process, wired: knowledge, fleet, dispatcher, HTTP edge, admin. The only place that constructs them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry

from prefixpool.errors import SettingsError
from prefixpool.listening import bound
from prefixpool_router.admin import Explanations, Readiness, admin_app, exposition
from prefixpool_router.app import Edge
from prefixpool_router.credentials import Credentials
from prefixpool_router.dispatch import FleetDispatcher
from prefixpool_router.drain import Draining, drain
from prefixpool_router.explain import DecisionRing
from prefixpool_router.fleet import Fleet, FleetSettings
from prefixpool_router.fleet_tasks import FleetTasks
from prefixpool_router.knowledge import Knowledge
from prefixpool_router.kubernetes_members import KubernetesMembers, api_server
from prefixpool_router.membership import FileMembers, MembershipSource, StaticMembers, members_from_flags
from prefixpool_router.metrics import EdgeMetrics, RoutingMetrics
from prefixpool_router.settings import RouterSettings
from prefixpool_router.state import RouterReport, StateReport, replica_report

_log = logging.getLogger(__name__)
_READY_POLL_S: Final = 0.02


class Place(NamedTuple):
    """Which process of a router this is, and where it listens."""

    worker: int = 0
    admin_socket: Path | None = None  # instead of the admin port: a worker tells its parent only

    @property
    def shared(self) -> bool:
        """Whether other workers listen on the client port, too."""
        return self.admin_socket is not None


class Router:
    """All parts of one process. Raises SettingsError for settings that cannot work."""

    def __init__(self, settings: RouterSettings, place: Place = Place()) -> None:  # noqa: B008 (immutable)
        self.settings = settings
        self.place = place
        self.name = settings.name or f"{socket.gethostname()}-{os.getpid()}"
        self.draining = Draining()
        self.registry = CollectorRegistry()
        metrics = RoutingMetrics(self.registry)
        self.source = membership(settings)
        metrics.members_problem.set_function(lambda: bool(self.source.problem))
        self.fleet = Fleet(Knowledge(settings.index_bytes), metrics, _fleet_settings(settings), time.monotonic)
        self.decisions = DecisionRing(settings.explain_last)
        self.dispatcher = FleetDispatcher(self.fleet, metrics, self.decisions, policy=settings.policy)
        self.credentials = Credentials(settings)
        self.edge = Edge(
            settings,
            self.dispatcher,
            EdgeMetrics(self.registry),
            self.credentials,
            ready=lambda: self.readiness().ready,
        )
        self.admin_port = 0

    async def serve(self) -> int:
        """Until drained; how many answers were cut off. Raises OSError if a port is taken."""
        settings = self.settings
        async with self._admin(), self._knowing() as fleet:
            if self.place.shared:
                await self._ready()
            await self.edge.start(shared=self.place.shared)
            _log.info("serving", extra={"router": self.name, "port": self.edge.port, "admin_port": self.admin_port})
            try:
                await self._until_stopped(fleet)
            except BaseException:  # a defect, or cancellation: no drain, but nothing is left open either
                await self.edge.stop(0.0)
                raise
            return await drain(
                self.edge, self.draining, accept_s=settings.drain_accept_s, timeout_s=settings.drain_timeout_s
            )

    async def _until_stopped(self, fleet: asyncio.Task[None]) -> None:
        """A defect in what keeps the knowledge alive ends the process, which its supervisor then restarts."""
        stopped = asyncio.create_task(self.draining.wait(), name="until stopped")
        try:
            await asyncio.wait({stopped, fleet}, return_when=asyncio.FIRST_COMPLETED)
            if fleet.done():
                fleet.result()
        finally:
            stopped.cancel()
            await asyncio.gather(stopped, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def _admin(self) -> AsyncIterator[None]:
        runner = web.AppRunner(admin_app(_Telling(self)), access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            if self.place.admin_socket is not None:
                await web.UnixSite(runner, str(self.place.admin_socket)).start()
            else:
                for sock in bound(self.settings.admin_host, self.settings.admin_port):
                    await web.SockSite(runner, sock).start()
                self.admin_port = int(runner.addresses[0][1])
            yield
        finally:
            await runner.cleanup()

    @contextlib.asynccontextmanager
    async def _knowing(self) -> AsyncIterator[asyncio.Task[None]]:
        """The task that keeps the fleet's knowledge alive."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            tasks = FleetTasks(
                self.fleet,
                self.source,
                http,
                router=self.name,
                key=lambda: self.credentials.engine_key,
                probe_interval_s=self.settings.probe_interval_s,
            )
            running = asyncio.create_task(tasks.run(), name="fleet")
            try:
                yield running
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

    async def _ready(self) -> None:
        """A worker listens when it can serve: until then the kernel gives all connections to the others."""
        for _ in range(int(self.settings.warmup_s / _READY_POLL_S)):
            if self.readiness().ready or self.draining.begun:
                return
            await asyncio.sleep(_READY_POLL_S)

    def readiness(self) -> Readiness:
        """Of this process."""
        if self.draining.begun:
            return Readiness(False, "draining")
        return Readiness(*self.fleet.readiness(self.source.problem))

    def report(self) -> RouterReport:
        """Of this process."""
        fleet, (ready, why) = self.fleet, self.readiness()
        index, predicted = fleet.knowledge.index, fleet.knowledge.predicted
        return RouterReport(
            name=self.name,
            worker=self.place.worker,
            pid=os.getpid(),
            ready=ready,
            why=why,
            draining=self.draining.begun,
            uptime_s=round(fleet.clock() - fleet.started_s, 3),
            policy=self.settings.policy,
            members_problem=self.source.problem,
            index_boundaries=len(index),
            index_bytes=index.approximate_bytes,
            index_evictions=index.evicted + predicted.evicted,
            promised_boundaries=len(predicted),
            replicas=[replica_report(fleet, replica) for _, replica in sorted(fleet.replicas.items())],
        )


class _Telling:
    """admin.Telling of one process."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def readiness(self) -> Readiness:
        return self._router.readiness()

    async def state(self) -> StateReport:
        return StateReport(workers=[self._router.report()])

    async def explain(self, count: int, request_id: str) -> Explanations:
        told = []
        for decision in self._router.decisions.latest(count, request_id):
            told.append(decision.explanation(self._router.place.worker))
            await asyncio.sleep(0)  # each costs a fraction of a millisecond: requests come in between
        return Explanations(told)

    async def metrics(self) -> bytes:
        self._router.fleet.measure()
        # In a thread: with hundreds of replicas, writing all series takes tens of milliseconds.
        return await asyncio.to_thread(exposition, self._router.registry)


def membership(settings: RouterSettings) -> MembershipSource:
    """Raises SettingsError unless exactly one source is given."""
    if sum(map(bool, (settings.members, settings.replica, settings.kubernetes_service))) != 1:
        raise SettingsError(
            "give one of --members FILE, --kubernetes-service NAME, --replica NAME=ENGINE_URL[,AGENT_URL] (for each replica)"
        )
    if settings.kubernetes_service:
        return KubernetesMembers(api_server(settings))
    if settings.members:
        return FileMembers(Path(settings.members), settings.members_interval_s)
    return StaticMembers(members_from_flags(settings.replica))


def _fleet_settings(settings: RouterSettings) -> FleetSettings:
    return FleetSettings(
        history_ttl_s=settings.history_ttl_s,
        agent_grace_s=settings.agent_grace_s,
        warmup_s=settings.warmup_s,
        served_models=settings.served_models,
        ready_without_replicas=settings.ready_without_replicas,
    )
