"""A whole pool as processes of this machine: `prefixpool up`, the demo and the behaviour tests all use this.

Everything lives below one private run directory, `pp-XXXXXXXX`: `engine.key`, `members.json`, `r<ordinal>/` for each
replica (the worker's run directory), `router-<i>.log`. `stop()` ends every process and removes the directory.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Final, Literal

import aiohttp
import msgspec

from prefixpool import names, wire
from prefixpool.listing import listed
from prefixpool.private_directory import PrivateDirectory
from prefixpool_cli import engine_log, pool_files
from prefixpool_cli.errors import PoolError
from prefixpool_cli.pool_process import Process, kill_group
from prefixpool_cli.pool_router import Router
from prefixpool_cli.pool_share import PoolShare
from prefixpool_cli.pool_spec import MemberRow, PoolSpec, gpu_env, members_json, router_argv, worker_argv
from prefixpool_cli.pool_watch import Progress, Replica, Stage, Watcher, agent_info

Part = Literal["engine", "agent", "supervisor", "router"]

ROUTER_READY_S: Final = 120.0  # as long as it lives and answers; on a loaded machine imports alone take a while
ROUTER_STOP_S: Final = 8.0
HUNG_STOP_S: Final = 1.0  # for one that does not answer: it may yet hear SIGTERM
WORKER_STOP_S: Final = 30.0  # the engine's own deadline (10 s), 5 s more until it is killed, the agent, and some air
REMOVE_DRAIN_S: Final = 30.0
_TOLD: Final = 5  # replicas in one sentence


class LocalPool:
    """Owns all processes it starts. Not to be used by two tasks at once, except `kill` and the properties."""

    def __init__(self, spec: PoolSpec) -> None:
        self.spec = spec
        self.engine_key = ""
        self.replicas: dict[str, Replica] = {}
        self.routers: list[Router] = []
        self._directory: PrivateDirectory | None = None
        self._share = PoolShare(spec)
        self._http: aiohttp.ClientSession | None = None
        self._rows: dict[str, MemberRow] = {}
        self._agents_told = spec.agents
        self._told: frozenset[str] = frozenset()  # replicas that routers are told of; empty: all
        self._next = 0

    async def __aenter__(self) -> LocalPool:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def root(self) -> Path:
        """The run directory. Raises PoolError before `start`."""
        return self._open_directory.path

    @property
    def key_file(self) -> Path:
        """The pool's engine key."""
        return self.root / "engine.key"

    @property
    def router_url(self) -> str:
        """Base URL for clients, of the first router."""
        return self.routers[0].url

    @property
    def admin_url(self) -> str:
        """Base URL of the first router's admin side."""
        return self.routers[0].admin_url

    async def start(self, progress: Progress | None = None, *, router_timeout_s: float = ROUTER_READY_S) -> None:
        """All replicas at once, then the routers. Raises PoolError for the first part that fails; then, too, call `stop`."""
        told = progress or _quiet
        router_ports = self._share.router_ports()
        self._directory = pool_files.make_run_root()
        self.engine_key = pool_files.make_engine_key(self.key_file)
        self._http = aiohttp.ClientSession()
        for name in self._next_names(self.spec.replicas, told):
            await self._start_worker(name)
        await self._until_all_ready(told)
        self._write_members()
        for number, ports in enumerate(router_ports):
            name = f"router-{number}"
            self.routers.append(Router(name, self.spec.host, ports, self.root / f"{name}.log"))
            await self.start_router(number, progress=told, timeout_s=router_timeout_s)

    async def start_router(
        self, number: int = 0, *, policy: str = "", progress: Progress | None = None, timeout_s: float = ROUTER_READY_S
    ) -> None:
        """Start a router that is not running (its ports stay the same); returns when it is ready for clients.

        Raises PoolError if it ends or hangs before that, or is not ready in time.
        """
        router = self.routers[number]
        spec = msgspec.structs.replace(self.spec, policy=policy or self.spec.policy)
        argv = router_argv(spec, router.name, self._members_file, self.key_file, router.ports)
        told = progress or _quiet
        told(Stage(router.name, "starting", 0.0, 0.0))
        router.process = await Process.start(router.name, argv, router.log, self.spec.env)
        await router.until_ready(self._client, told, timeout_s)

    async def router_answers(self, number: int) -> bool:
        """Whether a router's event loop turns."""
        return await self.routers[number].answers(self._client)

    async def end_router(self, number: int) -> None:
        """One that hangs; nothing happens if it has ended."""
        process = self.routers[number].process
        if process is not None:
            await process.stop(HUNG_STOP_S)

    async def restart_router(
        self, number: int = 0, *, policy: str = "", agents: bool = True, only: Collection[str] = ()
    ) -> None:
        """A fresh router process: with another policy, with or without what agents know, or with some replicas only."""
        process = self.routers[number].process
        if process is not None:
            await process.stop(ROUTER_STOP_S)
        self._agents_told = agents
        self._told = frozenset(only)
        self._write_members()
        await self.start_router(number, policy=policy)

    async def add(self, progress: Progress | None = None) -> str:
        """One more replica; routers are told once it is ready. Returns its name."""
        (name,) = self._next_names(1, progress or _quiet)
        replica = await self._start_worker(name)
        await self._until_ready(replica, progress or _quiet)
        self._write_members()
        return replica.name

    async def remove(self, name: str, *, drain_s: float = REMOVE_DRAIN_S) -> None:
        """Drain a replica, stop it and take it from the members. Requests that run finish first."""
        replica = self.replicas[name]
        self._set_state(name, "terminating")
        request = msgspec.json.encode(wire.DrainRequest(timeout_s=drain_s, wait=True))
        async with self._client.post(
            replica.agent_url + names.PATH_DRAIN,
            data=request,
            headers={"authorization": f"Bearer {self.engine_key}", "content-type": "application/json"},
            timeout=aiohttp.ClientTimeout(total=drain_s + WORKER_STOP_S),
        ) as answer:
            if answer.status >= 400:
                raise PoolError(f"{name}: drain answered {answer.status}")
            await answer.read()
        await self._stop_worker(replica)
        self._share.release(name)
        del self.replicas[name], self._rows[name]
        self._write_members()

    def lost(self, name: str) -> None:
        """A replica will not come back: routers need not wait for it, and go on telling that it is missing."""
        self._set_state(name, "not_ready")

    async def info(self, name: str) -> wire.Info | None:
        """What a replica's agent says of itself; None while it does not answer."""
        return await agent_info(self._client, self.replicas[name], self.engine_key)

    def kill(self, name: str, part: Part, sig: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to one process: of a replica (`local-0`) or a router (`router-0`). Returns its pid.

        Raises PoolError if that part is not running.
        """
        pid = self._pid(name, part)
        if not pid:
            raise PoolError(f"{name}: no {part} is running")
        os.kill(pid, sig)
        return pid

    async def stop(self) -> None:
        """Stop routers, then workers; leave no process, socket or file. May be called at any time, and twice."""
        running = [router.process for router in self.routers if router.process is not None]
        await asyncio.gather(*(process.stop(ROUTER_STOP_S) for process in running))
        await asyncio.gather(*(self._stop_worker(replica) for replica in self.replicas.values()))
        self.replicas.clear()
        self.routers.clear()
        self._rows.clear()
        if self._http is not None:
            await self._http.close()
            self._http = None
        self._share.close()
        directory, self._directory = self._directory, None
        if directory is not None:
            try:
                if self.spec.keep_logs:
                    pool_files.keep_logs(directory.path, Path(self.spec.keep_logs))
            finally:
                directory.remove()

    @property
    def _open_directory(self) -> PrivateDirectory:
        if self._directory is None:
            raise PoolError("the pool is not running")
        return self._directory

    @property
    def _members_file(self) -> Path:
        return self.root / "members.json"

    @property
    def _client(self) -> aiohttp.ClientSession:
        if self._http is None:
            raise PoolError("the pool is not running")
        return self._http

    def _next_names(self, count: int, progress: Progress) -> list[str]:
        """Of so many replicas to start, their cores chosen. Says so if some must share theirs."""
        first, self._next = self._next, self._next + count
        replicas = [f"{self.spec.name}-{ordinal}" for ordinal in range(first, self._next)]
        crowded = self._share.bind_cores(replicas, sorted(os.sched_getaffinity(0)))
        if crowded:
            words = f"more engines than cores: {listed(crowded, _TOLD)} must share with others, and will be slow"
            progress(Stage("cores", words, 1.0, 0.0, ready=True))
        return replicas

    async def _start_worker(self, name: str) -> Replica:
        ordinal = int(name.rpartition("-")[2])
        run_dir = self.root / f"r{ordinal}"
        pool_files.make_run_dir(run_dir)
        ports = self._share.ports(name)
        argv = worker_argv(self.spec, name, run_dir, self.key_file, ports, self._share.cores(name))
        env = {**gpu_env(self.spec, ordinal), **self.spec.env}
        process = await Process.start(name, argv, run_dir / "worker.log", env, keeping=(self._open_directory.lock,))
        replica = Replica(name, run_dir, f"http://127.0.0.1:{ports.engine}", f"http://127.0.0.1:{ports.agent}", process)
        self.replicas[name] = replica
        return replica

    async def _until_all_ready(self, progress: Progress) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for replica in self.replicas.values():
                    group.create_task(self._until_ready(replica, progress))
        except ExceptionGroup as errors:  # one replica's failure ends the start; the others were cancelled
            raise errors.exceptions[0] from errors

    async def _until_ready(self, replica: Replica, progress: Progress) -> None:
        watcher = Watcher(replica, self.engine_key, engine_log.stage)
        await watcher.until_ready(self._client, progress, self.spec.startup_timeout_s)
        self._rows[replica.name] = MemberRow(replica.name, replica.engine_url, replica.agent_url)

    async def _stop_worker(self, replica: Replica) -> None:
        if await replica.process.stop(WORKER_STOP_S):
            return
        # The supervisor was killed, so its children are ours to end: each leads a process group of its own.
        state = replica.supervisor()
        for pid in (state.engine.pid, state.agent.pid) if state else ():
            kill_group(pid or 0)

    def _pid(self, name: str, part: Part) -> int:
        if part == "router":
            process = next((r.process for r in self.routers if r.name == name), None)
            return process.pid if process and process.returncode is None else 0
        replica = self.replicas[name]
        if part == "supervisor":
            return replica.process.pid
        state = replica.supervisor()
        if state is None:
            return 0
        return (state.engine.pid if part == "engine" else state.agent.pid) or 0

    def _set_state(self, name: str, state: str) -> None:
        self._rows[name] = self._rows[name]._replace(state=state)
        self._write_members()

    def _write_members(self) -> None:
        rows = [row for name, row in self._rows.items() if not self._told or name in self._told]
        pool_files.write_private(self._members_file, members_json(rows, agents=self._agents_told))


def _quiet(stage: Stage) -> None:
    """Progress that nobody asked for."""
