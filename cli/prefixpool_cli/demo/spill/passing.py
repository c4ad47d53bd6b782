"""One arm of the demo of tiers in its running pool: the requests, the death of a replica, the check of answers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

import aiohttp
import msgspec

from prefixpool import wire
from prefixpool_agent.engines.metrics import EngineLoad
from prefixpool_cli.admin import AdminClient
from prefixpool_cli.demo.client import ChatClient, RequestFailedError
from prefixpool_cli.demo.greedy import GreedyFigures, compare
from prefixpool_cli.demo.ideal import reusable
from prefixpool_cli.demo.report import ArmTokens, Setup
from prefixpool_cli.demo.runner import Run, answered
from prefixpool_cli.demo.samples import Arm, Sample
from prefixpool_cli.demo.show import told
from prefixpool_cli.demo.spill import counters, figures
from prefixpool_cli.demo.spill.figures import Death, Repeat, TierTokens
from prefixpool_cli.demo.spill.plan import SpillArm
from prefixpool_cli.demo.spill.report import Passed
from prefixpool_cli.demo.tokens import Tokenizer
from prefixpool_cli.demo.workload import Workload
from prefixpool_cli.display import ArmDisplay
from prefixpool_cli.errors import CliError
from prefixpool_cli.local_pool import LocalPool

REPEATS: Final = 5  # old prompts that a replica which came back is asked again
BACK_S: Final = 600.0  # until a killed engine serves again; 40 s on two idle cores
POLL_S: Final = 0.2
TELL_S: Final = 10.0  # between words about a wait
COMPARED: Final = "one engine alone"


class Work(NamedTuple):
    """What every arm is sent."""

    workload: Workload
    concurrency: int


class _Death(NamedTuple):
    death: Death
    lost: EngineLoad  # what the killed engine had counted
    paused_s: float  # how long the workload stood still
    repeated: tuple[Sample, ...]


class Passing:
    """One arm in its running pool."""

    def __init__(self, pool: LocalPool, http: aiohttp.ClientSession, work: Work, arm: SpillArm, bars: ArmDisplay) -> None:
        self.arm = arm
        self._pool = pool
        self._http = http
        self._work = work
        self._bars = bars

    async def run(self) -> Passed:
        """Raises CliError or RequestFailedError."""
        steps = len(self._work.workload.order)
        self._bars.begin(self.arm.name, steps)
        client = ChatClient(self._http, self._pool.router_url, self._pool.spec.model_name)
        run = Run(client, self._work.workload, told(self._bars, self.arm.name))
        started_s, death = time.monotonic(), None
        if self.arm.dies:
            death = await self._death(run, steps // 2, steps // 4)
        samples = await run.all(self._work.concurrency)
        ended_s = time.monotonic() - (death.paused_s if death else 0.0)
        arm = Arm(name=self.arm.name, policy="prefix", precise=True, started_s=started_s, ended_s=ended_s, samples=samples)
        tokens = await Tokenizer(self._engine(next(iter(self._pool.replicas)))).of(samples)
        tiers = figures.tier_tokens([await self._load(name) for name in self._pool.replicas])
        passed = Passed(requests=ArmTokens(arm, tokens), replicas=self.arm.replicas, tiers=tiers)
        return self._with_death(passed, death) if death else passed

    def _with_death(self, passed: Passed, seen: _Death) -> Passed:
        """What a killed engine had counted is added, and what was asked beside the workload is taken away."""
        beside = sum((repeat.found for repeat in seen.death.repeats), start=TierTokens())
        arm = passed.requests.arm
        return msgspec.structs.replace(
            passed,
            tiers=passed.tiers + figures.tier_tokens([seen.lost]) - beside,
            restart=figures.restart_figures(arm, self._pool.spec.block_tokens, seen.death),
            repeats=msgspec.structs.replace(arm, samples=seen.repeated),
        )

    async def _death(self, run: Run, before: int, meanwhile: int) -> _Death:
        """A replica is killed; the other one goes on, waits with the rest, and lets the one that is back answer alone."""
        samples = await run.all(self._work.concurrency, before)
        served = Counter(s.replica for s in samples if not s.error)
        victim = max(self._pool.replicas, key=lambda name: served[name])
        lost = await self._load(victim)
        killed_s = time.monotonic()
        self._pool.kill(victim, "engine")
        self._bars.note(self.arm.name, f"{victim} killed; the other one goes on")
        await run.all(self._work.concurrency, meanwhile)
        paused_s = time.monotonic()
        await self._until_known(victim, restarts=1)
        seconds = time.monotonic() - killed_s
        self._bars.note(self.arm.name, f"{victim} is back after {seconds:.0f} s")
        repeats = await self._repeats(figures.old_requests(samples, victim, REPEATS), victim)
        return _Death(
            death=Death(victim, before, before + meanwhile, seconds, tuple(repeat for _, repeat in repeats)),
            lost=lost,
            paused_s=time.monotonic() - paused_s,
            repeated=tuple(sample for sample, _ in repeats),
        )

    async def _repeats(self, old: Sequence[Sample], victim: str) -> list[tuple[Sample, Repeat]]:
        """One at a time, through a router that knows no other replica."""
        await self._pool.restart_router(only=[victim])
        await self._until_known(victim)
        router = ChatClient(self._http, self._pool.router_url, self._pool.spec.model_name)
        out = []
        for sample in old:
            out.append(await self._repeat(router, sample, victim))
            self._bars.note(self.arm.name, f"{len(out)} of {len(old)} old prompts sent to {victim} again")
        await self._pool.restart_router()
        for name in self._pool.replicas:
            await self._until_known(name)
        return out

    async def _repeat(self, router: ChatClient, old: Sample, victim: str) -> tuple[Sample, Repeat]:
        before = figures.tier_tokens([await self._load(victim)])
        limit = self._work.workload.sessions[old.session].turns[old.turn].max_tokens
        said = await answered(router, old, limit)
        if said.error:
            raise RequestFailedError(f"request {old.step} again: {said.error}")
        found = figures.tier_tokens([await self._load(victim)]) - before
        decisions = await AdminClient(self._http, self._pool.admin_url).explain(1, said.request_id)
        if not decisions:
            raise CliError(f"the router does not explain request {said.step}, which it has just answered")
        tiers = decisions[0].tiers
        return said, Repeat(
            step=said.step,
            prompt_tokens=said.prompt_tokens,
            reusable_tokens=reusable(said.prompt_tokens, self._pool.spec.block_tokens),
            expected=TierTokens(device=tiers.device_tokens, host=tiers.host_tokens, disk=tiers.disk_tokens),
            found=found,
        )

    async def _known(self, name: str, restarts: int) -> bool:
        """Its engine runs, its agent has read what is on disk, and the router has been told all of it."""
        info = await self._pool.info(name)
        if info is None or info.state is not wire.State.READY or info.restarts < restarts or not info.boundaries:
            return False
        state = await AdminClient(self._http, self._pool.admin_url).state()
        views = [view for worker in state.workers for view in worker.replicas if view.name == name]
        return all(
            view.usable and view.account == "whole" and view.epoch == info.epoch and view.boundaries >= info.boundaries
            for view in views
        )

    async def _until_known(self, name: str, restarts: int = 0) -> None:
        began_s = told_s = time.monotonic()
        while not await self._known(name, restarts):
            now_s = time.monotonic()
            if now_s - began_s > BACK_S:
                raise CliError(f"{name} does not serve again within {BACK_S:.0f} s of its death")
            if now_s - told_s > TELL_S:
                told_s = now_s
                self._bars.note(self.arm.name, f"all wait for {name}, {now_s - began_s:.0f} s")
            await asyncio.sleep(POLL_S)

    async def greedy(self, alone: Arm, others: Sequence[Arm]) -> GreedyFigures:
        """Against this pool's engine. Raises RequestFailedError."""
        unproven = tuple(figures.unproven(alone, others))
        self._bars.begin(COMPARED, len(unproven))
        asked = msgspec.structs.replace(alone, samples=unproven)
        engine = self._engine(next(iter(self._pool.replicas)))
        found = await compare(
            engine, asked, self._work.workload, 2, lambda _: self._bars.advance(COMPARED, "greedy answers compared")
        )
        return figures.greedy_figures(others, found.differences)

    async def setup(self) -> Setup:
        """As the pool's first agent says. Raises CliError if it does not answer."""
        info = await self._pool.info(next(iter(self._pool.replicas)))
        if info is None:
            raise CliError("no agent answers any more")
        return Setup(
            engine=info.engine,
            engine_version=info.engine_version,
            model=self._pool.spec.model_name,
            replicas=1,
            block_tokens=info.block_tokens,
            device_tokens=info.device_tokens,
            concurrency=self._work.concurrency,
            seed=self._work.workload.seed,
        )

    def _engine(self, name: str) -> ChatClient:
        return ChatClient(
            self._http, self._pool.replicas[name].engine_url, self._pool.spec.model_name, self._pool.engine_key
        )

    async def _load(self, name: str) -> EngineLoad:
        return (await counters.read(self._http, self._pool, name)).load
