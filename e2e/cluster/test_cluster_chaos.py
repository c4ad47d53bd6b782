"""Minutes of accidents in a whole cluster, under steady load (CHAOS_S=120 seconds, CHAOS_SEED=1)."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Final, NamedTuple

import pytest

from prefixpool_cli.errors import CliError
from prefixpool_operator import kube
from prefixpool_router.state import ReplicaReport, RouterReport
from prefixpool_testing import chart
from prefixpool_testing.cluster.load import ERROR_EVENT, LOST, End, load
from prefixpool_testing.cluster.node import Node
from prefixpool_testing.cluster.product import OPERATOR, POOL_S, PoolPlace
from prefixpool_testing.eventually import eventually
from prefixpool_testing.operated import LOOK_S, POOLS

CHAOS_S = float(os.environ.get("CHAOS_S", "120"))
SEED = int(os.environ.get("CHAOS_SEED", "1"))
EVERY_S = 10.0
POOL = "chaos"
REPLICAS = 3
# What may end early in each kind of accident: with an engine, the streams in it; with a router, what it was relaying.
EXCUSES: Final = {"engine": {ERROR_EVENT}, "router": {LOST}, "network": {ERROR_EVENT, LOST}}
_KILL: Final = 'import json, os, sys; os.kill(json.load(open("/run/prefixpool/w/supervisor.json"))[sys.argv[1]]["pid"], 9)'


@pytest.fixture(scope="session")
def hands(cluster: Node) -> Iterator[ThreadPoolExecutor]:
    """Restarts programs of the node beside the event loop. They end with the thread that started them, hence one for all."""
    with ThreadPoolExecutor(1) as thread:
        yield thread


class Accident(NamedTuple):
    kind: str
    target: str
    began_s: float
    ended_s: float  # all was well again

    def excuses(self, end: End) -> bool:
        return end.how in EXCUSES.get(self.kind, ()) and end.began_s <= self.ended_s and end.ended_s >= self.began_s


class Chaos:
    """One accident after the other; each is over before the next."""

    def __init__(self, place: PoolPlace, hands: ThreadPoolExecutor, draw: Random) -> None:
        self.accidents: list[Accident] = []
        self._place = place
        self._hands = hands
        self._draw = draw
        self._loop = asyncio.get_running_loop()

    async def run(self, seconds: float) -> None:
        """All kinds once, in random order, before any comes again."""
        kinds: list[Callable[[str], Awaitable[None]]] = [
            *(self.agent, self.engine, self.router, self.operator),
            *(self.api_server, self.containerd, self.pod, self.network),
        ]
        ends_s, left = self._loop.time() + seconds, list[Callable[[str], Awaitable[None]]]()
        while self._loop.time() < ends_s:
            left = left or self._draw.sample(kinds, len(kinds))
            kind, target, began_s = left.pop(), f"{POOL}-{self._draw.randrange(REPLICAS)}", self._loop.time()
            await kind(target)
            await self.well()
            self.accidents.append(Accident(kind.__name__, target, began_s, self._loop.time()))
            await asyncio.sleep(began_s + EVERY_S - self._loop.time())

    async def well(self) -> None:
        """All replicas are ready, and all routers know the caches of all of them."""
        await self._place.until_ready(POOL, REPLICAS)
        await self._routers(_all_is_well, "all routers know all replicas precisely")

    async def agent(self, target: str) -> None:
        before = await self._place.routers(POOL)
        await self._kill(target, "agent")

        def lost(name: str, router: RouterReport) -> bool:
            return _view(router, target).stream_losses > _view(before[name], target).stream_losses

        await self._routers(lost, f"the agent of {target} is gone")

    async def engine(self, target: str) -> None:
        before = await self._place.routers(POOL)
        await self._kill(target, "engine")

        def another(name: str, router: RouterReport) -> bool:
            return _view(router, target).epoch > _view(before[name], target).epoch

        await self._routers(another, f"the engine of {target} was started again")

    async def router(self, target: str) -> None:
        before = (await self._place.restarts(POOL))[target, "router"]
        await asyncio.to_thread(self._place.cluster.kill_container, target, "router", self._place.namespace)
        await self._place.until_restarted(POOL, target, "router", before + 1)

    async def operator(self, _target: str) -> None:
        names = await self._operators("{.items[*].metadata.name}")
        restarts = "{.items[*].status.containerStatuses[0].restartCount}"
        before = sum(map(int, await self._operators(restarts)))
        await asyncio.to_thread(self._place.cluster.kill_container, self._draw.choice(names), "operator", chart.NAMESPACE)

        async def restarted() -> bool:
            return sum(map(int, await self._operators(restarts))) > before

        await eventually(restarted, within_s=POOL_S, every_s=LOOK_S, what="the operator was started again")
        await self._place.api.kubectl_async("-n", chart.NAMESPACE, "rollout", "status", OPERATOR, "--timeout=100s")

    async def api_server(self, _target: str) -> None:
        await self._loop.run_in_executor(self._hands, self._place.api.kill)
        await asyncio.sleep(5 * self._draw.random())
        await self._loop.run_in_executor(self._hands, self._place.api.start)

    async def containerd(self, _target: str) -> None:
        await self._loop.run_in_executor(self._hands, self._place.cluster.restart_containerd)

    async def pod(self, target: str) -> None:
        before = await self._uid(target)
        await self._place.kubectl("delete", "pod", target, "--wait=false")

        async def another() -> bool:
            return await self._uid(target) not in ("", before)

        await eventually(another, within_s=POOL_S, every_s=LOOK_S, what=f"{target} has a successor")

    async def network(self, target: str) -> None:
        found = await self._place.get(kube.POD, target)
        assert found is not None

        def unusable(name: str, router: RouterReport) -> bool:
            return name == target or not _view(router, target).usable

        others = [f"{POOL}-{number}" for number in range(REPLICAS) if f"{POOL}-{number}" != target]
        with self._place.cluster.cut(found["status"]["podIP"]):
            await self._routers(unusable, f"{target} is out of reach", *others)

    async def _kill(self, target: str, program: str) -> None:
        await self._place.kubectl("exec", target, "-c", "worker", "--", "python3", "-c", _KILL, program)

    async def _uid(self, pod: str) -> str:
        """Blank: there is none at the moment."""
        found = await self._place.get(kube.POD, pod)
        return str(found["metadata"]["uid"]) if found else ""

    async def _operators(self, path: str) -> list[str]:
        chosen = ("get", "pods", "-l", "app.kubernetes.io/component=operator", "-o", f"jsonpath={path}")
        return (await self._place.api.kubectl_async("-n", chart.NAMESPACE, *chosen)).split()

    async def _routers(self, right: Callable[[str, RouterReport], bool], what: str, *pods: str) -> None:
        """Until the routers in these pods (default: in all) see it so."""

        async def check() -> bool:
            try:
                routers = await self._place.routers(POOL, *pods)
            except CliError:  # one does not answer yet
                return False
            return bool(routers) and all(right(name, router) for name, router in routers.items())

        await eventually(check, within_s=POOL_S, every_s=LOOK_S, what=what)


def _view(router: RouterReport, replica: str) -> ReplicaReport:
    return next(view for view in router.replicas if view.name == replica)


def _all_is_well(_name: str, router: RouterReport) -> bool:
    whole = [view for view in router.replicas if view.usable and view.mode == "precise" and view.account == "whole"]
    return router.ready and not router.members_problem and len(whole) == len(router.replicas) == REPLICAS


@pytest.mark.alone
@pytest.mark.usefixtures("nothing_leaves")
async def test_accidents_cost_only_what_was_inside_what_died(place: PoolPlace, hands: ThreadPoolExecutor) -> None:
    await place.apply(POOL, replicas=REPLICAS)
    chaos = Chaos(place, hands, Random(SEED))
    await chaos.well()
    async with load(await place.client_of(POOL), POOL) as seen:
        began_s = asyncio.get_running_loop().time()
        await chaos.run(CHAOS_S)
    print(f"\nseed {SEED}; chats {dict(seen.chats)}, streams {dict(seen.streams)}")
    for one in chaos.accidents:
        ends = Counter(end.how for end in seen.ends if one.excuses(end))
        when = f"{one.began_s - began_s:6.1f} s  {one.kind:10} {one.target}"
        print(f"{when}  well after {one.ended_s - one.began_s:5.1f} s  {dict(ends)}")
    assert not seen.wrong
    unexcused = [end for end in seen.ends if not any(one.excuses(end) for one in chaos.accidents)]
    assert not [f"{end.began_s - began_s:.1f} to {end.ended_s - began_s:.1f} s: {end.how}: {end.what}" for end in unexcused]
    await place.kubectl("scale", f"{POOLS}/{POOL}", "--replicas=2")
    await place.until_ready(POOL, 2)
