"""A whole pool for behaviour tests: real supervisors, sim engines, agents and routers, as processes on this machine.

    async with started(PoolOptions(replicas=2), folder) as pool:
        first = await pool.client.chat(text("a document"))
        await pool.settled()

Routers have two scopes, `alpha` and `beta`, each with a key. Every text carries MARKER, so that a log or a socket that holds
any prompt is found by searching for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import Final

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from prefixpool import names, wire
from prefixpool.api.engine import EngineKind
from prefixpool_cli import pool_files
from prefixpool_cli.admin import AdminClient
from prefixpool_cli.errors import PoolError
from prefixpool_cli.local_pool import LocalPool
from prefixpool_cli.pool_process import Process
from prefixpool_cli.pool_spec import PoolSpec
from prefixpool_cli.ports import claimed_ports
from prefixpool_router.auth import scope_salt
from prefixpool_router.explain import Explanation
from prefixpool_router.state import ReplicaReport, RouterReport
from prefixpool_testing.eventually import PATIENCE_S, eventually
from prefixpool_testing.pool_client import PoolClient, Reply

MARKER: Final = "quetzalmarker"  # in every prompt, in nothing else
MODEL: Final = "sim"
ADAPTER: Final = "tuned"
KEYS: Final = {"alpha": "key-of-alpha", "beta": "key-of-beta"}
SALT_KEY: Final = b"salt key of the tests"
_WORDS: Final = ("river", "stone", "lamp", "orchard", "winter", "copper", "signal", "harbour", "needle", "market", "valley")
STILL_S: Final = 0.06  # so long without news: nothing is under way between processes
_LETTERS: Final = str.maketrans("0123456789", "ghijklmnop")

Known = tuple[int, ...]  # how much agents have heard, and agents and routers know; empty while something is under way


class PoolOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What tests choose. `time_scale`: simulated seconds last so many real ones."""

    replicas: int = 2
    routers: int = 1
    router_workers: int = 1
    device_blocks: int = 400
    time_scale: float = 0.02
    engine_args: str = ""
    router_args: tuple[str, ...] = ()
    worker_args: tuple[str, ...] = ()


class SimPool:
    """A running pool, of sims unless its spec says otherwise. `client` speaks as scope alpha, `other` as beta.

    Both with the first router. `elsewhere` is alpha at the last one: the first knows of its requests from agents only.
    """

    def __init__(self, local: LocalPool, http: aiohttp.ClientSession, folder: Path) -> None:
        self.local = local
        self.http = http
        self._folder = folder
        self._model = local.spec.model_name
        self.client = self.client_of("alpha")
        self.other = self.client_of("beta")
        self.elsewhere = self.client_of("alpha", router=-1)

    def client_of(self, scope: str, router: int = 0) -> PoolClient:
        return PoolClient(self.http, self.local.routers[router].url, KEYS[scope], self._model)

    def engine(self, name: str) -> PoolClient:
        """One engine itself, with the pool's key."""
        return PoolClient(self.http, self.local.replicas[name].engine_url, self.local.engine_key, self._model)

    def agent(self, name: str) -> PoolClient:
        """One agent, with the pool's key."""
        return PoolClient(self.http, self.local.replicas[name].agent_url, self.local.engine_key, self._model)

    @property
    def names(self) -> list[str]:
        return sorted(self.local.replicas)

    def another(self, name: str) -> str:
        """A replica that is not `name`."""
        return next(other for other in self.names if other != name)

    # -- what routers say

    async def routers(self) -> list[RouterReport]:
        """Every process of every router."""
        reports = [await self._admin(i).state() for i in range(len(self.local.routers))]
        return [worker for report in reports for worker in report.workers]

    async def views(self, name: str) -> list[ReplicaReport]:
        """One replica, as every router process sees it; those that do not know it are left out."""
        return [view for router in await self.routers() for view in router.replicas if view.name == name]

    async def explain(self, request_id: str) -> Explanation:
        """The last decision about a request."""
        found = [each for i in range(len(self.local.routers)) for each in await self._admin(i).explain(5, request_id)]
        assert found, "no router remembers this request"
        return max(found, key=lambda each: each.at)

    async def held(self, reply: Reply) -> dict[str, int]:
        """Tokens of a request that each candidate was believed to hold, in any tier, when it was routed."""
        return {each.name: each.held_tokens for each in (await self.explain(reply.request_id)).candidates}

    async def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of all routers with these labels."""
        found = [sample for router in self.local.routers for sample in await self._samples(router.admin_url)]
        return sum(s.value for s in found if s.name == name and labels.items() <= s.labels.items())

    async def _samples(self, url: str) -> list[Sample]:
        async with self.http.get(url + names.PATH_METRICS) as answer:
            return samples(await answer.text())

    def _admin(self, router: int) -> AdminClient:
        return AdminClient(self.http, self.local.routers[router].admin_url)

    # -- waiting

    async def info(self, name: str) -> wire.Info:
        """What an agent says. Raises AssertionError if it does not answer."""
        info = await self.local.info(name)
        assert info is not None, f"the agent of {name} does not answer"
        return info

    async def settled(self) -> None:
        """Until no request is under way, agents have placed all they heard of, and every router process knows it."""
        await settled(self._known)

    async def _known(self) -> Known:
        """Agents first: what they have told by then, routers have read when they answer."""
        infos = [await self.info(name) for name in self.names]
        heard = [heard_by(await self._samples(self.local.replicas[name].agent_url)) for name in self.names]
        views = [view for router in await self.routers() for view in router.replicas]
        busy = [info for info in infos if info.inflight or info.state is not wire.State.READY]
        whole = all(view.account == "whole" and not view.own_inflight for view in views)
        if busy or not whole:
            return ()
        return (*(info.boundaries for info in infos), *heard, *(view.boundaries for view in views))

    async def usable(self, *replicas: str, within_s: float = PATIENCE_S) -> None:
        """Until all routers send requests to these replicas (default: to all), and know their caches precisely."""

        async def check() -> bool:
            views = [view for name in replicas or self.names for view in await self.views(name)]
            return bool(views) and all(view.usable and view.account == "whole" for view in views)

        await eventually(check, within_s=within_s, what=f"{replicas or self.names} usable")

    async def in_flight(self, name: str, requests: int) -> None:
        """Until all routers know that so many requests are in a replica."""

        async def check() -> bool:
            return all(view.inflight == requests for view in await self.views(name))

        await eventually(check, what=f"{requests} requests in {name}")

    async def knows_nothing_of(self, name: str, within_s: float = PATIENCE_S) -> None:
        """Until no router process holds anything that an agent told of this replica's cache."""

        async def check() -> bool:
            return all(view.boundaries == 0 for view in await self.views(name))

        await eventually(check, within_s=within_s, what=f"nothing known of {name}")

    # -- what they leave

    def logs(self) -> dict[str, str]:
        """Text of every log file so far, by its place."""
        if not self.local.replicas and not self.local.routers:
            return _read_logs(self._folder / "logs")
        return _read_logs(self.local.root)


def sim_spec(options: PoolOptions) -> PoolSpec:
    """A pool of sims."""
    return PoolSpec(
        model=MODEL,
        engine=EngineKind.SIM,
        replicas=options.replicas,
        routers=options.routers,
        router_workers=options.router_workers,
        device_blocks=options.device_blocks,
        dev_mode=True,
        engine_args=f"--time-scale {options.time_scale} --adapters {ADAPTER} {options.engine_args}",
        router_args=options.router_args,
        worker_args=options.worker_args,
    )


@asynccontextmanager
async def started(options: PoolOptions, folder: Path) -> AsyncIterator[SimPool]:
    """`folder` gets the key files, and the logs when the pool stops."""
    async with running(sim_spec(options), folder) as pool:
        yield pool


@asynccontextmanager
async def running(spec: PoolSpec, folder: Path) -> AsyncIterator[SimPool]:
    """A pool of any engines, with the scopes of the tests."""
    flags = (*_key_files(folder), *spec.router_args)
    spec = msgspec.structs.replace(spec, router_args=flags, keep_logs=str(folder / "logs"))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http, LocalPool(spec) as local:
        try:
            await local.start()
        except PoolError as error:
            error.add_note(error.hint)  # the end of a log: what pytest should show
            raise
        yield SimPool(local, http, folder)


@asynccontextmanager
async def lone_engine(folder: Path, blocks: int) -> AsyncIterator[str]:
    """A sim that is in no pool, without a gate; its URL."""
    with claimed_ports(1) as (port,):
        flags = {"model": MODEL, "port": port, "num-gpu-blocks-override": blocks, "time-scale": 0}
        argv = [sys.executable, "-m", "prefixpool_agent.sim.main", *(f"--{name}={value}" for name, value in flags.items())]
        process = await Process.start("engine alone", argv, folder / "engine.log", {})
        url = f"http://127.0.0.1:{port}"
        try:
            await _until_healthy(process, url)
            yield url
        finally:
            await process.stop(5)


async def _until_healthy(process: Process, url: str) -> None:
    async with aiohttp.ClientSession() as http:

        async def answers() -> bool:
            assert process.returncode is None, pool_files.tail(process.log)
            with suppress(aiohttp.ClientConnectionError):
                async with http.get(f"{url}/health") as answer:
                    return answer.status == 200
            return False

        await eventually(answers, what="the engine alone answers")


def samples(text: str) -> list[Sample]:
    """Of Prometheus text."""
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def heard_by(agent: Iterable[Sample]) -> int:
    """Notes and batches of events that an agent has heard."""
    names = ("prefixpool_agent_notes_total", "prefixpool_agent_event_batches_total")
    return int(sum(sample.value for sample in agent if sample.name in names))


async def settled(known: Callable[[], Awaitable[Known]]) -> None:
    """Until `known` has said the same for a while: agents hear of events and map them some milliseconds later."""
    loop = asyncio.get_running_loop()
    last: Known = ()
    since_s = loop.time()

    async def check() -> bool:
        nonlocal last, since_s
        now = await known()
        if now != last:
            last, since_s = now, loop.time()
        return bool(last) and loop.time() - since_s >= STILL_S

    await eventually(check, what="routers know what agents know")


def _key_files(folder: Path) -> tuple[str, ...]:
    """Flags of the routers. `alpha` may choose its policy."""
    keys, salt = folder / "keys", folder / "salt.key"
    digests = {scope: hashlib.sha256(key.encode()).hexdigest() for scope, key in KEYS.items()}
    keys.write_text(f"{digests['alpha']} alpha allow=policy\n{digests['beta']} beta\n")
    salt.write_bytes(SALT_KEY)
    return f"--keys-file={keys}", f"--salt-key-file={salt}"


def salt_of(scope: str) -> str:
    """What routers add for a scope: a secret of the pool's, for tests that try to forge it."""
    return scope_salt(SALT_KEY, scope)


def text(name: str, words: int = 150) -> str:
    """A text of so many words, about two tokens each. Two names share no block, even behind the template's own words."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:8].translate(_LETTERS)
    draw = Random(name)
    return f"{digest} {MARKER} {name}: " + " ".join(draw.choice(_WORDS) for _ in range(words)) + "."


def _read_logs(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text(errors="replace") for path in sorted(root.rglob("*.log"))}
