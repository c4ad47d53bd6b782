"""Runs the demo of tiers: a pool for each arm, one after the other, with caches that are empty at first."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import aiohttp
import msgspec
from rich.console import Console

from prefixpool_cli.demo.greedy import GreedyFigures
from prefixpool_cli.demo.report import ArmTokens, Setup
from prefixpool_cli.demo.samples import Arm
from prefixpool_cli.demo.spill.passing import Passing, Work
from prefixpool_cli.demo.spill.plan import ALONE, ARMS, TIMES, Sizes, SpillArm, worker_args
from prefixpool_cli.demo.spill.probing import Prober
from prefixpool_cli.demo.spill.report import Passed, SpillReport, build
from prefixpool_cli.demo.spill.ttft import Probe, tier_times
from prefixpool_cli.display import ArmDisplay, PoolDisplay
from prefixpool_cli.errors import CliError
from prefixpool_cli.local_pool import LocalPool
from prefixpool_cli.pool_spec import PoolSpec


class Plan(NamedTuple):
    """What to run. `spec`: of every arm's pool, but for replicas, sizes and tiers; `timed...`: of the arm TIMES."""

    spec: PoolSpec
    sizes: Sizes
    timed_spec: PoolSpec
    timed: Sizes
    work: Work
    arms: Sequence[SpillArm]
    check_output: bool


class Shown(NamedTuple):
    """The report, and what it was made from."""

    report: SpillReport
    arms: list[ArmTokens]
    probes: list[Probe]


class SpillShow:
    """One demo. Owns a pool at a time, and its directory on disk; the session stays the caller's."""

    def __init__(self, plan: Plan, http: aiohttp.ClientSession, out: Path, console: Console) -> None:
        self._plan = plan
        self._http = http
        self._out = out
        self._console = console
        self._setup: Setup | None = None
        self._greedy: GreedyFigures | None = None
        self._begun = 0

    async def run(self) -> Shown:
        """Raises CliError or RequestFailedError where no report is possible; failed requests are counted in the report."""
        probes = await self._timed() if TIMES in self._plan.arms else []
        passed: dict[str, Passed] = {}
        arms = [arm for arm in self._plan.arms if arm is not TIMES]
        # The device alone comes last: its engine then says whether answers with tiers were right.
        for arm in sorted(arms, key=lambda each: each is ALONE):
            passed[arm.name] = await self._passed(arm, [one for each in passed.values() for one in each.answers()])
        found = [passed[arm.name] for arm in arms]
        if self._setup is None:
            raise CliError(
                "no arm ran that sends the workload", f"name one: {', '.join(a.name for a in ARMS if a is not TIMES)}"
            )
        report = build(self._setup, self._plan.sizes, found, tier_times(probes), self._greedy)
        return Shown(report, [each.requests for each in found], probes)

    async def _timed(self) -> list[Probe]:
        async with self._pool(TIMES, self._plan.timed_spec, self._plan.timed) as pool:
            with ArmDisplay(self._console) as bars:
                return await Prober(pool, self._http, bars, self._plan.work.workload.seed).run()

    async def _passed(self, arm: SpillArm, others: Sequence[Arm]) -> Passed:
        async with self._pool(arm, self._plan.spec, self._plan.sizes) as pool:
            with ArmDisplay(self._console) as bars:
                passing = Passing(pool, self._http, self._plan.work, arm, bars)
                self._setup = self._setup or await passing.setup()
                passed = await passing.run()
                if arm is ALONE and others and self._plan.check_output:
                    self._greedy = await passing.greedy(passed.requests.arm, others)
                return passed

    @asynccontextmanager
    async def _pool(self, arm: SpillArm, like: PoolSpec, sizes: Sizes) -> AsyncIterator[LocalPool]:
        """An arm's pool, running; its disk is a new directory that goes with it."""
        self._begun += 1
        with TemporaryDirectory(prefix="kv-", dir=self._out) as folder:
            spec = msgspec.structs.replace(
                like,
                replicas=arm.replicas,
                device_blocks=sizes.device_blocks,
                max_model_len=sizes.max_model_len,
                worker_args=(*like.worker_args, *worker_args(arm, sizes, folder)),
                keep_logs=str(self._out / "logs" / arm.name),
            )
            async with LocalPool(spec) as pool:
                words = f"\n{self._begun} of {len(self._plan.arms)}, [bold]{arm.name}[/]: {arm.words}"
                self._console.print(words, highlight=False)
                with PoolDisplay(self._console) as display:
                    await pool.start(display)
                yield pool
                self._console.print(f"{arm.name}: stopping its pool", highlight=False)
