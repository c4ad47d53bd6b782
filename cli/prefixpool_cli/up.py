"""`prefixpool up`: a pool on this machine until Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import shlex
from math import inf
from pathlib import Path

import msgspec
from rich.console import Console

from prefixpool.api.engine import EngineKind
from prefixpool_agent.settings import Device
from prefixpool_agent.supervisor_client import SupervisorError
from prefixpool_cli import pool_files, preflight
from prefixpool_cli.console import shown
from prefixpool_cli.display import PoolDisplay
from prefixpool_cli.errors import PoolError
from prefixpool_cli.local_pool import LocalPool
from prefixpool_cli.pool_spec import PoolSpec
from prefixpool_cli.pool_watch import Replica
from prefixpool_cli.router_keeper import RouterKeeper

WATCH_S = 1.0


async def up(spec: PoolSpec, console: Console) -> bool:
    """Starts, tells where, and serves until cancelled. Raises CliError if it cannot start, or when no replica is left."""
    if spec.engine is EngineKind.VLLM and spec.device is Device.CUDA:
        spec = msgspec.structs.replace(spec, gpus=preflight.gpus())
    preflight.check(spec)
    if spec.keep_logs:
        pool_files.make_logs_folder(Path(spec.keep_logs))
    async with LocalPool(spec) as pool:
        with PoolDisplay(console) as display:
            await pool.start(display, router_timeout_s=inf)  # its replicas may be slow; Ctrl-C is at hand
        console.print(_welcome(pool), highlight=False, soft_wrap=True)
        try:
            await Watch(pool, console).run()
        finally:
            console.print("stopping replicas and routers ...")
    return False


def _welcome(pool: LocalPool) -> str:
    lines = [f"[bold]{shown(pool.spec.model_name)}[/] on {len(pool.replicas)} replicas"]
    lines += [f"  endpoint  {router.url}/v1" for router in pool.routers]
    lines += [f"  admin     {pool.admin_url}  (explain, metrics, state)"]
    lines += ["", "try it:", f"  {shown(curl_line(pool.router_url, pool.spec.model_name))}"]
    lines += [f"  prefixpool explain --admin {pool.admin_url}"]
    lines += [
        f"  prefixpool doctor --admin {pool.admin_url} --engine-key-file {shown(str(pool.key_file))}",
        "",
        "Ctrl-C stops everything.",
    ]
    return "\n".join(lines)


def curl_line(url: str, model: str) -> str:
    """A request to copy into a shell."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32}
    return f"curl -i {url}/v1/chat/completions -H 'content-type: application/json' -d {shlex.quote(json.dumps(body))}"


class Watch:
    """Says what becomes of the parts of a running pool, and goes on with those that are left."""

    def __init__(self, pool: LocalPool, console: Console) -> None:
        self._pool = pool
        self._console = console
        self._told: dict[str, str] = {}
        self._ended: set[str] = set()
        self._keepers = [RouterKeeper(pool, number, self._say) for number in range(len(pool.routers))]

    async def run(self) -> None:
        """Until cancelled. Raises PoolError when no replica or no router is left."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep_routers())
                await self._look_at_replicas()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def _keep_routers(self) -> None:
        """Each by itself: one may take long to be ready."""
        last = await asyncio.gather(*(keeper.run() for keeper in self._keepers))
        raise PoolError(f"no router is left: {last[-1].message}", last[-1].hint)

    async def _look_at_replicas(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            for name, replica in self._pool.replicas.items():
                self._look(name, replica)
            if len(self._ended) == len(self._pool.replicas):
                raise PoolError("no replica is left: all supervisors have ended")

    def _look(self, name: str, replica: Replica) -> None:
        code = replica.process.returncode
        if code is not None:
            if name not in self._ended:
                self._ended.add(name)
                self._pool.lost(name)
                self._say(f"{name}: its supervisor ended with code {code}; going on without this replica")
            return
        try:
            state = replica.supervisor()
        except SupervisorError:  # what cannot be read now is no reason to end what serves
            return
        words = f"{state.engine.phase.value}, {state.engine.restarts} restarts" if state else "unknown"
        if self._told.setdefault(name, words) != words:
            self._told[name] = words
            reason = state.engine.reason if state else ""
            self._say(f"{name}: engine {words}{': ' + reason if reason else ''}")

    def _say(self, words: str) -> None:
        self._console.print(shown(words), highlight=False)
