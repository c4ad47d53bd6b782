"""Runs the demo of tiers: a pool for each arm, one after the other, with caches that are empty at first."""

from __future__ import annotations

from collections.abc import Sequence
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
from prefixpool_cli.demo.spill.plan import ALONE, Sizes, SpillArm, worker_args
from prefixpool_cli.demo.spill.report import Passed, SpillReport, build
from prefixpool_cli.display import ArmDisplay, PoolDisplay
from prefixpool_cli.errors import CliError
from prefixpool_cli.local_pool import LocalPool
from prefixpool_cli.pool_spec import PoolSpec


class Plan(NamedTuple):
    """What to run. `spec`: of every arm's pool, but for its replicas and tiers."""

    spec: PoolSpec
    sizes: Sizes
    work: Work
    arms: Sequence[SpillArm]
    check_output: bool


class SpillShow:
    """One demo. Owns a pool at a time, and its directory on disk; the session stays the caller's."""

    def __init__(self, plan: Plan, http: aiohttp.ClientSession, out: Path, console: Console) -> None:
        self._plan = plan
        self._http = http
        self._out = out
        self._console = console
        self._setup: Setup | None = None
        self._greedy: GreedyFigures | None = None

    async def run(self) -> tuple[SpillReport, list[ArmTokens]]:
        """Raises CliError or RequestFailedError where no report is possible; failed requests are counted in the report."""
        passed: dict[str, Passed] = {}
        # The device alone comes last: its engine then says whether answers with tiers were right.
        for arm in sorted(self._plan.arms, key=lambda each: each is ALONE):
            passed[arm.name] = await self._in_pool(arm, [each.requests.arm for each in passed.values()])
        found = [passed[arm.name] for arm in self._plan.arms]
        if self._setup is None:
            raise CliError("no arm ran")
        return build(self._setup, self._plan.sizes, found, self._greedy), [each.requests for each in found]

    async def _in_pool(self, arm: SpillArm, others: Sequence[Arm]) -> Passed:
        with TemporaryDirectory(prefix="kv-", dir=self._out) as folder:
            tiers = worker_args(arm, self._plan.sizes, folder)
            spec = msgspec.structs.replace(
                self._plan.spec,
                replicas=arm.replicas,
                worker_args=(*self._plan.spec.worker_args, *tiers),
                keep_logs=str(self._out / "logs" / arm.name),
            )
            async with LocalPool(spec) as pool:
                self._console.print(f"\n[bold]{arm.name}[/]: {arm.words}", highlight=False)
                with PoolDisplay(self._console) as display:
                    await pool.start(display)
                with ArmDisplay(self._console) as bars:
                    return await self._judged(Passing(pool, self._http, self._plan.work, arm, bars), others)

    async def _judged(self, passing: Passing, others: Sequence[Arm]) -> Passed:
        self._setup = self._setup or await passing.setup()
        passed = await passing.run()
        if passing.arm is ALONE and others and self._plan.check_output:
            self._greedy = await passing.greedy(passed.requests.arm, others)
        return passed
