"""`prefixpool up`: a pool on this machine until Ctrl-C."""

from __future__ import annotations

import asyncio

import msgspec
from rich.console import Console

from prefixpool_agent.settings import Device, EngineKind
from prefixpool_cli import preflight
from prefixpool_cli.display import PoolDisplay
from prefixpool_cli.errors import PoolError
from prefixpool_cli.local_pool import LocalPool
from prefixpool_cli.pool_spec import PoolSpec

WATCH_S = 1.0


async def up(spec: PoolSpec, console: Console) -> bool:
    """Starts, tells where, and serves until cancelled. Raises CliError if it cannot start or a part dies for good."""
    if spec.engine is EngineKind.VLLM and spec.device is Device.CUDA:
        spec = msgspec.structs.replace(spec, gpus=preflight.gpus())
    preflight.check(spec)
    async with LocalPool(spec) as pool:
        with PoolDisplay(console) as display:
            await pool.start(display)
        console.print(_welcome(pool), highlight=False, soft_wrap=True)
        try:
            await _watch(pool, console)
        finally:
            console.print("stopping replicas and routers ...")
    return False


def _welcome(pool: LocalPool) -> str:
    lines = [f"[bold]{pool.spec.model_name}[/] on {len(pool.replicas)} replicas"]
    lines += [f"  endpoint  {router.url}/v1" for router in pool.routers]
    lines += [f"  admin     {pool.admin_url}  (explain, metrics, state)"]
    lines += ["", "try it:", f"  {curl_line(pool.router_url, pool.spec.model_name)}"]
    lines += [f"  prefixpool explain --admin {pool.admin_url}", "", "Ctrl-C stops everything."]
    return "\n".join(lines)


def curl_line(url: str, model: str) -> str:
    """A request to copy into a shell."""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}], "max_tokens": 32}}'
    return f"curl -i {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"


async def _watch(pool: LocalPool, console: Console) -> None:
    """Until cancelled: say what the supervisors see; routers that die are started again, because clients know their port."""
    told: dict[str, str] = {}
    while True:
        await asyncio.sleep(WATCH_S)
        for name, replica in pool.replicas.items():
            if replica.process.returncode is not None:
                raise PoolError(f"{name}: its supervisor ended with code {replica.process.returncode}")
            state = replica.supervisor()
            words = f"{state.engine.phase.value}, {state.engine.restarts} restarts" if state else "unknown"
            if told.setdefault(name, words) != words:
                told[name] = words
                reason = state.engine.reason if state else ""
                console.print(f"{name}: engine {words}{': ' + reason if reason else ''}", highlight=False)
        for number, router in enumerate(pool.routers):
            if router.process is not None and router.process.returncode is not None:
                console.print(f"{router.name} ended with code {router.process.returncode}; starting it again")
                await pool.start_router(number)
