"""`prefixpool demo`: starts a pool, shows the arms, writes the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import aiohttp
from rich.console import Console

from prefixpool.api.engine import EngineKind
from prefixpool_cli import preflight
from prefixpool_cli.console import shown
from prefixpool_cli.demo import page, report, show, workload
from prefixpool_cli.demo.capacity import device_blocks
from prefixpool_cli.demo.client import RequestFailedError
from prefixpool_cli.display import ArmDisplay, PoolDisplay
from prefixpool_cli.errors import CliError
from prefixpool_cli.local_pool import LocalPool
from prefixpool_cli.pool_spec import PoolSpec

BLOCK_TOKENS: Final = 32
MAX_MODEL_LEN: Final = 4096
SIM_MODEL: Final = "sim-135m"
# The sim runs on the clock: times are scaled so that all arms take less than a minute.
SIM_TIME_SCALE: Final = 0.025
# The greedy comparison (greedy.py) asks for equal answers, however a prompt was split. In bf16 this model's logits move in
# steps of 0.125, so that rounding alone turns ties over; in float32 only a wrong cache can.
DTYPE: Final = "float32"


def pool_spec(engine: EngineKind, model: str, replicas: int, blocks: int, out: Path) -> PoolSpec:
    """The pool that the demo needs."""
    sim = engine is EngineKind.SIM
    return PoolSpec(
        name="demo",
        model=model or SIM_MODEL,
        engine=engine,
        replicas=replicas,
        block_tokens=BLOCK_TOKENS,
        device_blocks=blocks,
        max_model_len=MAX_MODEL_LEN,
        dev_mode=True,
        engine_args=f"--time-scale {SIM_TIME_SCALE}" if sim else "",
        worker_args=() if sim else ("--dtype", DTYPE),
        keep_logs=str(out / "logs"),
    )


def prepare(spec: PoolSpec, out: Path) -> None:
    """Raises CliError for what would make the demo fail later."""
    preflight.check(spec)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Raises CliError if a report cannot be written."""
    try:
        yield
    except OSError as error:
        raise CliError(
            f"the report cannot be written to {out}: {error.strerror}", "choose another folder with --out"
        ) from error


async def run(spec: PoolSpec, plan: show.Plan, out: Path, console: Console) -> bool:
    """False if a goal was missed. Raises CliError if a request failed, an answer was wrong, or nothing can be reported."""
    async with LocalPool(spec) as pool:
        with PoolDisplay(console) as display:
            await pool.start(display)
        console.print(_announcement(spec, plan), highlight=False)
        async with aiohttp.ClientSession() as http:
            try:
                with ArmDisplay(console) as arms:
                    found, samples = await show.Show(pool, http, plan, arms).run()
            except RequestFailedError as error:
                raise CliError(f"the demo could not be judged: {error}") from error
    with writing(out):
        write(found, samples, out)
    console.print(report.arms_table(found))
    console.print(report.goals_table(found))
    console.print(shown(f"\nreport: {out / 'report.html'}, {out / 'report.json'}"), highlight=False, soft_wrap=True)
    raise_if_wrong(found, samples)
    return told(found.goals, console)


def told(goals: Sequence[report.Goal], console: Console) -> bool:
    """Say what was missed; False if that was more than times, which depend on what else the machine does."""
    late = report.missed(goals, timing=True)
    if late:
        console.print(f"[yellow]not met, perhaps because the machine is busy:[/] {late}", highlight=False, soft_wrap=True)
    missed = report.missed(goals, timing=False)
    if missed:
        console.print(f"[red]not met:[/] {missed}", highlight=False, soft_wrap=True)
    return not missed


def _announcement(spec: PoolSpec, plan: show.Plan) -> str:
    holds = (spec.device_blocks - 1) * spec.block_tokens
    return (
        f"{len(plan.workload.order)} requests through {len(plan.arms)} arms, {plan.concurrency} in flight; a replica holds "
        f"{holds:,} tokens, about two thirds of what the work needs"
    )


def write(found: report.Report, samples: list[report.ArmTokens], out: Path) -> None:
    """report.json, report.html, samples.jsonl."""
    (out / "report.json").write_bytes(report.to_json(found))
    (out / "samples.jsonl").write_bytes(show.samples_json(samples))
    (out / "report.html").write_text(page.render(found, samples), encoding="utf-8")


def plan(requests: int, arms: list[str], concurrency: int, *, check_output: bool, evicting: bool) -> show.Plan:
    """Raises CliError for an arm that there is not."""
    unknown = set(arms) - {arm.name for arm in show.ARMS}
    if unknown:
        raise CliError(f"no such arm: {', '.join(sorted(unknown))}", f"arms are {', '.join(arm.name for arm in show.ARMS)}")
    loaded = workload.load()
    return show.Plan(
        workload=workload.first(loaded, requests) if requests else loaded,
        arms=[arm for arm in show.ARMS if not arms or arm.name in arms],
        concurrency=concurrency,
        check_output=check_output,
        evicting=evicting,
    )


def blocks_for(chosen: show.Plan, engine: EngineKind) -> int:
    """Device blocks that put this workload under pressure, but at least those of the longest sequence and the null block."""
    return max(device_blocks(chosen.workload, engine, BLOCK_TOKENS), MAX_MODEL_LEN // BLOCK_TOKENS + 1)


def raise_if_wrong(found: report.Report, samples: list[report.ArmTokens]) -> None:
    """Raises CliError for the first request that failed, or for answers that were wrong."""
    failed = show.first_error(samples)
    if failed:
        raise CliError(f"{found.errors()} requests failed; the first: {failed}")
    if found.greedy is not None and found.greedy.wrong:
        told = [
            f"request {d.step}: {d.pool!r}, alone {d.alone!r}, gap {d.gap:.3f}"
            for d in found.greedy.differences
            if not d.is_tie
        ]
        raise CliError(f"{found.greedy.wrong} answers differ from those of one engine alone", "\n".join(told))
