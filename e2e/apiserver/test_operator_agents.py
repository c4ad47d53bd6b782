"""What agents say reaches a pool's status: asked with the pool's own key, at the pods' addresses."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from prefixpool import names
from prefixpool.wire import Download, State
from prefixpool_operator import kube
from prefixpool_testing.agent_info import info
from prefixpool_testing.cluster.api_server import ApiServer
from prefixpool_testing.eventually import eventually
from prefixpool_testing.operated import POOLS, Place, operated
from prefixpool_testing.operator_program import ready_status

ADDRESS = "127.77.0.1"  # loopback is wide: where agents of no other test listen
BLOCKS = 1000
GIB = 1 << 30


class Agent:
    """Says what an engine is said to have allocated."""

    def __init__(self, **changes: Any) -> None:
        self.key = ""
        self.says = changes

    async def info(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.Response(status=401)
        found = info("p-0", engine="sim", **self.says)
        return web.Response(body=msgspec.json.encode(found))


async def test_measured_blocks_correct_the_plan_and_say_so(api: ApiServer) -> None:
    measured = Agent(device_blocks=BLOCKS, device_tokens=16 * BLOCKS)
    async with asked(measured) as agent, operated(api) as (client, _):
        with Place(api, client) as place:
            await running(place, agent)
            await place.until("p", "Sized", "True", "Measured")
            pool = await place.get(kube.POOL, "p")
    assert pool is not None
    sizing = pool["status"]["sizing"]
    assert (sizing["source"], sizing["devicePerReplica"]["blocks"]) == ("Measured", BLOCKS + 1), "the null block included"


async def test_a_download_is_told_in_events_and_what_stops_it_is_degraded(api: ApiServer) -> None:
    agent = Agent(state=State.STARTING, download=Download(model="org/m", done_bytes=33 * GIB, total_bytes=80 * GIB))
    async with asked(agent), operated(api) as (client, _):
        with Place(api, client) as place:
            await running(place, agent, but=("Ready",))
            told = "Downloading org/m on p-0: 40 %, 32.0 GiB of 80.0 GiB."
            await eventually(lambda: says(place, "Downloading", told), within_s=30, what="the Event")
            assert told in await place.until("p", "Progressing", "True")
            stuck = Download(model="org/m", done_bytes=33 * GIB, total_bytes=80 * GIB, problem="no space is left")
            agent.says = {"state": State.STARTING, "download": stuck}
            await place.kubectl("annotate", POOLS, "p", "look=again")
            assert "p-0: org/m does not come: no space is left" in await place.until(
                "p", "Degraded", "True", "DownloadFailed"
            )
            agent.says = {}
            await run(place)
            await place.until("p", "Degraded", "False", "Healthy")


async def running(place: Place, agent: Agent, *, but: tuple[str, ...] = ()) -> None:
    """A pool of one pod without these conditions, whose agent has got the pool's key."""
    await place.apply("p", replicas=1)
    await place.until_replicas("p", 1, within_s=60)
    secret = await place.get(kube.SECRET, "p-keys")
    assert secret is not None
    agent.key = base64.b64decode(secret["data"]["engine"]).decode()
    await run(place, but)


async def run(place: Place, but: tuple[str, ...] = ()) -> None:
    for pod in await place.pods("p"):
        status = ready_status(pod, ADDRESS)
        status["conditions"] = [one for one in status["conditions"] if one["type"] not in but]
        await place.kubelet.say(pod, status)


async def says(place: Place, reason: str, message: str) -> bool:
    found = await place.client.list_all(kube.EVENT, place.namespace, fields=f"reason={reason}")
    return [event["message"] for event in found] == [message]


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
