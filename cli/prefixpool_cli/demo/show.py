"""Runs the demo: one pool, all arms one after the other, then what is needed to judge them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple

import aiohttp
import msgspec

from prefixpool import wire
from prefixpool_cli.demo import report as reports
from prefixpool_cli.demo.client import ChatClient, RequestFailedError
from prefixpool_cli.demo.figures import quantile
from prefixpool_cli.demo.greedy import GreedyFigures, compare
from prefixpool_cli.demo.report import ArmTokens, Report, Setup
from prefixpool_cli.demo.runner import ArmPlan, Done, run_arm
from prefixpool_cli.demo.samples import Arm, Sample
from prefixpool_cli.demo.tokens import Tokenizer
from prefixpool_cli.demo.workload import Workload
from prefixpool_cli.display import ArmDisplay
from prefixpool_cli.errors import CliError
from prefixpool_cli.local_pool import LocalPool

ARMS: Final = (
    ArmPlan("round_robin", "round_robin"),
    ArmPlan("least_load", "least_load"),
    ArmPlan("chwbl", "chwbl"),
    ArmPlan("prefix_approximate", "prefix", agents=False),
    ArmPlan("prefix", "prefix"),
)
# Under `prefix` the work fits into two replicas and little is lost. So that predictions are also judged where caches forget
# all the time, it goes to one replica alone once more, with that replica's share of requests in flight.
EVICTING: Final = ArmPlan("prefix_one_replica", "prefix")
FORGET_S: Final = 10.0


class Plan(NamedTuple):
    """What to run."""

    workload: Workload
    arms: Sequence[ArmPlan]
    concurrency: int
    check_output: bool
    evicting: bool


class Show:
    """One demo on a running pool. The pool and the session stay the caller's."""

    def __init__(self, pool: LocalPool, http: aiohttp.ClientSession, plan: Plan, display: ArmDisplay) -> None:
        self._pool = pool
        self._http = http
        self._plan = plan
        self._display = display
        self._engines = [
            ChatClient(http, replica.engine_url, pool.spec.model_name, pool.engine_key) for replica in pool.replicas.values()
        ]

    async def run(self) -> tuple[Report, list[ArmTokens]]:
        """Raises CliError or RequestFailedError where no report is possible; failed requests are counted in the report."""
        arms = [await self._arm(plan) for plan in self._plan.arms]
        judged = next((arm for arm in arms if arm.name == "prefix"), None) if self._plan.check_output else None
        extra, greedy = await self._judging(judged)
        tokenizer = Tokenizer(self._engines[0])
        found = [ArmTokens(arm, await tokenizer.of(arm.samples)) for arm in arms]
        found += [ArmTokens(arm, await tokenizer.of(arm.samples), compared=False) for arm in extra]
        return reports.build(await self._setup(), found, greedy), found

    async def _judging(self, judged: Arm | None) -> tuple[list[Arm], GreedyFigures | None]:
        """Both at once, on a replica each: they do not compete for a core."""
        await self._forget()
        names = list(self._pool.replicas)
        await self._pool.restart_router(policy=EVICTING.policy, only=names[:1])
        evicting = asyncio.ensure_future(self._evicting())
        try:
            greedy = await self._greedy(judged) if judged is not None else None
            return await evicting, greedy
        finally:
            evicting.cancel()
            await asyncio.gather(evicting, return_exceptions=True)

    async def _evicting(self) -> list[Arm]:
        if not self._plan.evicting:
            return []
        share = max(1, self._plan.concurrency // len(self._engines))
        return [await self._requests(EVICTING, share)]

    async def _greedy(self, judged: Arm) -> GreedyFigures:
        name = "one engine alone"
        self._display.begin(name, len(judged.answered()))
        return await compare(
            self._engines[-1],
            judged,
            self._plan.workload,
            2,
            lambda sample: self._display.advance(name, "greedy answers compared"),
        )

    async def _arm(self, plan: ArmPlan) -> Arm:
        await self._forget()
        await self._pool.restart_router(policy=plan.policy, agents=plan.agents)
        return await self._requests(plan, self._plan.concurrency)

    async def _requests(self, plan: ArmPlan, concurrency: int) -> Arm:
        workload = self._plan.workload
        self._display.begin(plan.name, len(workload.order))
        client = ChatClient(self._http, self._pool.router_url, self._pool.spec.model_name)
        return await run_arm(client, workload, plan, concurrency, told(self._display, plan.name))

    async def _forget(self) -> None:
        """Empty every cache, and wait until the agents have seen it, lest a router hears of what is gone."""
        await asyncio.gather(*(engine.post("/reset_prefix_cache", {}) for engine in self._engines))
        loop = asyncio.get_running_loop()
        deadline = loop.time() + FORGET_S
        while not await self._forgotten():
            if loop.time() > deadline:
                raise CliError(f"an agent still lists boundaries {FORGET_S:.0f} s after its engine's cache was reset")
            await asyncio.sleep(0.05)

    async def _forgotten(self) -> bool:
        return all(info is not None and not info.boundaries for info in await self._infos())

    async def _infos(self) -> list[wire.Info | None]:
        return list(await asyncio.gather(*(self._pool.info(name) for name in self._pool.replicas)))

    async def _setup(self) -> Setup:
        infos = [info for info in await self._infos() if info is not None]
        if not infos:
            raise CliError("no agent answers any more")
        return Setup(
            engine=infos[0].engine,
            engine_version=infos[0].engine_version,
            model=self._pool.spec.model_name,
            replicas=len(self._pool.replicas),
            block_tokens=infos[0].block_tokens,
            device_tokens=min(info.device_tokens for info in infos),
            concurrency=self._plan.concurrency,
            seed=self._plan.workload.seed,
        )


def told(display: ArmDisplay, name: str) -> Done:
    """Tells of an arm's requests as they end."""
    seen: list[Sample] = []

    def done(sample: Sample) -> None:
        seen.append(sample)
        good = [s for s in seen if not s.error]
        cached, prompt = sum(s.cached_tokens for s in good), sum(s.prompt_tokens for s in good)
        median = quantile([s.ttft_s for s in good], 0.5)
        words = f"hit rate {cached / max(1, prompt):.3f}, TTFT p50 {median * 1000:,.0f} ms"
        failed = len(seen) - len(good)
        display.advance(name, words + (f", {failed} errors" if failed else ""))

    return done


def first_error(arms: Sequence[ArmTokens]) -> str:
    """What the first failed request said; empty if none failed."""
    for each in arms:
        for sample in each.arm.samples:
            if sample.error:
                return f"{each.arm.name}, request {sample.step} ({sample.kind}): {sample.error}"
    return ""


def samples_json(arms: Sequence[ArmTokens]) -> bytes:
    """One line a request, without its text: for questions that the report does not answer."""
    lines = []
    for each in arms:
        for sample in each.arm.samples:
            row = msgspec.to_builtins(msgspec.structs.replace(sample, messages=(), reply=""))
            lines.append(msgspec.json.encode({"arm": each.arm.name, **row}))
    return b"\n".join(lines) + b"\n"


__all__ = ["ARMS", "Plan", "RequestFailedError", "Show", "first_error", "samples_json", "told"]
