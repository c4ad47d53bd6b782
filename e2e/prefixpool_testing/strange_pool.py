"""A pool of one strange replica: worker and agent as processes, the router in this one.

Its engine has one of the habits of strange_sim.py; everything else is the product.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import aiohttp
import msgspec

from prefixpool import names, wire
from prefixpool_agent import worker
from prefixpool_agent.supervisor.plan import Plan
from prefixpool_cli import pool_files
from prefixpool_cli.pool_process import Process
from prefixpool_cli.ports import claimed_ports
from prefixpool_router.explain import Explanation
from prefixpool_router.serve import Router
from prefixpool_router.settings import RouterSettings
from prefixpool_router.state import ReplicaReport
from prefixpool_testing.eventually import eventually
from prefixpool_testing.pool_client import PoolClient
from prefixpool_testing.router_here import explanation, router_here
from prefixpool_testing.sim_pool import MODEL, Known, heard_by, samples, settled

_KIT: Final = str(Path(__file__).parents[1])
STOP_S: Final = 15.0


class StrangePool:
    """Running. `client` goes through the router, `elsewhere` through another: of its requests only the agent tells."""

    def __init__(
        self, router: Router, other: Router, http: aiohttp.ClientSession, agent_url: str, key: str, logs: Path
    ) -> None:
        self.client, self.elsewhere = (
            PoolClient(http, f"http://127.0.0.1:{one.edge.port}", "", MODEL) for one in (router, other)
        )
        self._router = router
        self._http = http
        self._agent = PoolClient(http, agent_url, key, MODEL)
        self._logs = logs

    @property
    def view(self) -> ReplicaReport:
        """The replica, as the router sees it."""
        (view,) = self._router.report().replicas
        return view

    def explain(self, request_id: str) -> Explanation:
        """The decision about a request."""
        return explanation(self._router, request_id)

    async def router_metrics(self) -> str:
        """Prometheus text."""
        admin = PoolClient(self._http, f"http://127.0.0.1:{self._router.admin_port}", "", MODEL)
        return (await admin.get(names.PATH_METRICS)).body.decode()

    async def info(self) -> wire.Info:
        """What the agent says. Raises AssertionError with its log if it does not answer."""
        try:
            answer = await self._agent.get(names.PATH_INFO)
        except aiohttp.ClientError as error:
            raise AssertionError(f"the agent does not answer: {error}; its log:\n{self.agent_log()}") from None
        return msgspec.json.decode(answer.body, type=wire.Info)

    async def agent_metrics(self) -> str:
        """Prometheus text."""
        return (await self._agent.get(names.PATH_METRICS)).body.decode()

    def agent_log(self) -> str:
        return (self._logs / names.RUN_AGENT_LOG).read_text()

    async def settled(self) -> None:
        """Until no request is under way and the router knows what the agent knows."""
        await settled(self._known)

    async def _known(self) -> Known:
        info, heard = await self.info(), heard_by(samples(await self.agent_metrics()))
        view = self.view
        return () if info.inflight or view.own_inflight else (info.boundaries, heard, view.boundaries)


@asynccontextmanager
async def strange_pool(habit: str, *engine_flags: str, blocks: int = 400) -> AsyncIterator[StrangePool]:
    """`habit`: of strange_sim.py."""
    with TemporaryDirectory(prefix="pp") as folder, claimed_ports(2) as ports:  # short, for sockets
        root = Path(folder)
        key = pool_files.make_engine_key(root / "key")
        engine, agent = (f"http://127.0.0.1:{port}" for port in ports)
        plan = _plan(root, ports, habit, blocks, engine_flags)
        process = await Process.start(habit, _supervisor(plan), root / "worker.log", {})
        try:
            settings = RouterSettings(
                replica=(f"odd-0={engine}", agent),
                engine_key_file=str(root / "key"),
                port=0,
                admin_port=0,
                drain_accept_s=0,
            )
            async with aiohttp.ClientSession() as http, router_here(settings) as router, router_here(settings) as other:
                await eventually(lambda: _known(router, other), within_s=30, what="both routers know the replica")
                yield StrangePool(router, other, http, agent, key, plan.run_dir)
        except AssertionError as error:
            for log in sorted(root.rglob("*.log")):
                error.add_note(f"{log.name}: {pool_files.tail(log)}")
            raise
        finally:
            await process.stop(STOP_S)


def _plan(root: Path, ports: list[int], habit: str, blocks: int, engine_flags: tuple[str, ...]) -> Plan:
    flags = {"replica": "odd-0", "run-dir": root / "r", "model": MODEL, "engine": "sim", "engine-key-file": root / "key"}
    flags |= {"engine-port": ports[0], "agent-port": ports[1], "device-blocks": blocks, "max-model-len": 2048}
    argv = [*(f"--{name}={value}" for name, value in flags.items()), "--", "--time-scale=0.02", *engine_flags]
    settings = worker.read_settings(argv, dict(os.environ))
    plan = worker.worker_plan(settings, worker.look_at_host(settings.model, settings.run_dir))
    python, _, module, *own = plan.engine.argv
    assert module == "prefixpool_agent.sim.main"
    path = os.pathsep.join([_KIT, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]).rstrip(os.pathsep)
    odd = replace(
        plan.engine,
        argv=(python, "-m", "prefixpool_testing.strange_sim", habit, *own),
        env={**plan.engine.env, "PYTHONPATH": path},
    )
    return replace(plan, engine=odd)


def _supervisor(plan: Plan) -> list[str]:
    plan.run_dir.mkdir(mode=0o700)
    path = plan.run_dir / worker.PLAN_FILE
    path.write_text(plan.to_json())
    return [sys.executable, "-m", "prefixpool_agent.supervisor", str(path)]


async def _known(*routers: Router) -> bool:
    views = [view for router in routers for view in router.report().replicas]
    return len(views) == len(routers) and all(view.usable and view.account == "whole" for view in views)
