"""What do many agents cost one router process? Writes build/bench/agents.json.

Fake agents live in this process, the router in its own. Every agent holds `HELD` boundaries, tells its load `LOADS_PER_S`
times a second, and publishes and retracts `CHANGED` boundaries as often. `first_precise_s`: from starting the router's
process to the first request, sent once the router is ready, that goes where its prompt is held. `rss_bytes` and
`cpu_fraction` (of one core) are the router's alone, over `MEASURE_S` of steady state without requests.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from prefixpool.chain import canonical, prefix_chain
from prefixpool.names import H_PREDICTED
from prefixpool.wire import Load, Tier

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))  # the fake agents are the tests'

from prefixpool_testing.fake_agent import FakeAgent

FLEETS = (64, 256)
HELD = 2_500
LOADS_PER_S = 5
CHANGED = 20
MEASURE_S = 10.0
DEADLINE_S = 120.0
CHAT = {"model": "model", "messages": [{"role": "user", "content": "the prompt that somebody holds " * 200}]}


async def main() -> None:
    rows = [await measure(agents) for agents in FLEETS]
    out = Path("build/bench/agents.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{'agents':>7} {'RSS MiB':>9} {'CPU':>7} {'first precise s':>16}")
    for row in rows:
        rss_mib, cpu = row["rss_bytes"] / 2**20, row["cpu_fraction"]
        print(f"{row['agents']:>7} {rss_mib:>9.1f} {cpu:>7.1%} {row['first_precise_s']:>16.2f}")


async def measure(count: int) -> dict[str, Any]:
    draw = random.Random(count)
    agents = [FakeAgent(f"pool-{i}", heartbeat=False) for i in range(count)]
    for agent in agents:
        agent.resident[Tier.DEVICE] = {draw.getrandbits(64): draw.randrange(16, 32_000) for _ in range(HELD)}
        await agent.start()
    await hold_prompt(agents[0])
    async with engine() as url, traffic(agents, draw), aiohttp.ClientSession() as http:
        members = [{"name": agent.replica, "engine": url, "agent": agent.url} for agent in agents]
        async with router(members) as (pid, port, admin_port, started):
            await ready(http, admin_port)
            first_precise_s = await first_precise(http, port) - started
            await asyncio.sleep(2.0)
            before = cpu_s(pid)
            await asyncio.sleep(MEASURE_S)
            cpu = (cpu_s(pid) - before) / MEASURE_S
            row = {
                "agents": count,
                "rss_bytes": rss_bytes(pid),
                "cpu_fraction": round(cpu, 4),
                "first_precise_s": round(first_precise_s, 3),
            }
    await asyncio.gather(*(agent.stop() for agent in agents))
    return row


async def hold_prompt(agent: FakeAgent) -> None:
    content = canonical("/v1/chat/completions", CHAT)
    assert content is not None
    chain = prefix_chain(content)
    await agent.hold(chain.hashes, array("I", [offset // 4 for offset in chain.offsets]))


@asynccontextmanager
async def engine() -> AsyncIterator[str]:
    """Answers for every replica."""

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        message = {"role": "assistant", "content": "yes"}
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def traffic(agents: list[FakeAgent], draw: random.Random) -> AsyncIterator[None]:
    """What living agents tell."""

    async def live(agent: FakeAgent) -> None:
        known: list[int] = []
        await asyncio.sleep(draw.random() / LOADS_PER_S)
        while True:
            await agent.report(Load(inflight=draw.randrange(32), free_blocks=draw.randrange(1000)))
            gone, known = known, [draw.getrandbits(64) for _ in range(CHANGED)]
            await agent.hold(known, [64] * CHANGED)
            if gone:
                await agent.drop(gone)
            await asyncio.sleep(1 / LOADS_PER_S)

    tasks = [asyncio.create_task(live(agent)) for agent in agents]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def router(members: list[dict[str, str]]) -> AsyncIterator[tuple[int, int, int, float]]:
    """Its process id, its ports, and when it was started."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(members, file)
        file.flush()
        started = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "prefixpool_router.main", "--members", file.name, "--port", "0", "--admin-port", "0"),
            *("--log-format", "json", "--drain-accept-s", "0"),
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        while (line := json.loads(await process.stderr.readline()))["message"] != "serving":
            pass
        reading = asyncio.create_task(process.stderr.read())
        try:
            yield process.pid, line["port"], line["admin_port"], started
        finally:
            process.terminate()
            await process.wait()
            await reading


async def ready(http: aiohttp.ClientSession, admin_port: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            async with http.get(f"http://127.0.0.1:{admin_port}/readyz") as answer:
                if answer.status == 200:
                    return
            await asyncio.sleep(0.02)


async def first_precise(http: aiohttp.ClientSession, port: int) -> float:
    """When the first request went where its prompt is."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            async with http.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=CHAT) as answer:
                await answer.read()
                replica = answer.headers.get("x-prefixpool-replica")
                if answer.status == 200 and replica == "pool-0" and int(answer.headers[H_PREDICTED]) > 1000:
                    return time.monotonic()
            await asyncio.sleep(0.02)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    asyncio.run(main())
