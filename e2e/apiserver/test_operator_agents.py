"""What agents say reaches a pool's status: asked with the pool's own key, at the pods' addresses."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web

from prefixpool import names
from prefixpool_operator import kube
from prefixpool_testing.agent_info import info
from prefixpool_testing.cluster.api_server import ApiServer
from prefixpool_testing.operated import Place, operated

ADDRESS = "127.77.0.1"  # loopback is wide: where agents of no other test listen
BLOCKS = 1000


class Agent:
    """Says what an engine is said to have allocated."""

    def __init__(self) -> None:
        self.key = ""

    async def info(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.Response(status=401)
        found = info("p-0", engine="sim", device_blocks=BLOCKS, device_tokens=16 * BLOCKS)
        return web.Response(body=msgspec.json.encode(found))


async def test_measured_blocks_correct_the_plan_and_say_so(api: ApiServer) -> None:
    async with asked(Agent()) as agent, operated(api) as (client, _):
        with Place(api, client) as place:
            await place.apply("p", replicas=1)
            await place.until_replicas("p", 1, within_s=60)
            secret = await place.get(kube.SECRET, "p-keys")
            assert secret is not None
            agent.key = base64.b64decode(secret["data"]["engine"]).decode()
            await place.kubelet.run_pods(place.namespace, "p", address=ADDRESS)
            await place.until("p", "Sized", "True", "Measured")
            pool = await place.get(kube.POOL, "p")
    assert pool is not None
    sizing = pool["status"]["sizing"]
    assert (sizing["source"], sizing["devicePerReplica"]["blocks"]) == ("Measured", BLOCKS + 1), "the null block included"


@asynccontextmanager
async def asked(agent: Agent) -> AsyncIterator[Agent]:
    """It listens where the operator looks for it."""
    app = web.Application()
    app.add_routes([web.get(names.PATH_INFO, agent.info)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, ADDRESS, names.AGENT_PORT).start()
        yield agent
    finally:
        await runner.cleanup()
