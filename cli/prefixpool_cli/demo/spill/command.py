"""`prefixpool demo --spill`: what host memory and disk add to the device, one pool after the other, with a report."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import aiohttp
import msgspec
from rich.console import Console

from prefixpool.api.engine import EngineKind
from prefixpool.sizing.kv import KvDtype, bytes_per_token
from prefixpool_agent.engines import sim
from prefixpool_cli.demo import command, report, show, workload
from prefixpool_cli.demo.client import RequestFailedError
from prefixpool_cli.demo.spill import plan
from prefixpool_cli.demo.spill import report as spill_report
from prefixpool_cli.demo.spill.passing import Work
from prefixpool_cli.demo.spill.show import Plan, SpillShow
from prefixpool_cli.errors import CliError
from prefixpool_cli.plan import find_model

FLOAT32: Final = 2  # times what a token takes in the two bytes that `bytes_per_token` counts with


def planned(
    engine: EngineKind, model: str, out: Path, requests: int, arms: list[str], concurrency: int, *, check_output: bool
) -> Plan:
    """Raises CliError or SizingError for what would make the demo fail later."""
    chosen = plan.arms(arms, engine)
    work = Work(workload.first(workload.load(), requests or plan.REQUESTS), concurrency or plan.CONCURRENCY)
    size = plan.sizes(work.workload, engine, command.BLOCK_TOKENS, _token_bytes(engine, model), command.MAX_MODEL_LEN)
    spec = command.pool_spec(engine, model, max(arm.replicas for arm in chosen), size.device_blocks, out)
    command.prepare(spec, out)
    spec = msgspec.structs.replace(spec, max_model_len=size.max_model_len)
    return Plan(spec, size, work, chosen, check_output)


def _token_bytes(engine: EngineKind, model: str) -> int:
    return sim.KV_TOKEN_BYTES if engine is EngineKind.SIM else FLOAT32 * bytes_per_token(find_model(model), KvDtype.AUTO)


async def run(chosen: Plan, out: Path, console: Console) -> bool:
    """Raises CliError if a request failed, an answer was wrong, or there is nothing to report."""
    console.print(_announcement(chosen), highlight=False)
    async with aiohttp.ClientSession() as http:
        try:
            found, samples = await SpillShow(chosen, http, out, console).run()
        except RequestFailedError as error:
            raise CliError(f"the demo could not be judged: {error}") from error
    write(found, samples, out)
    console.print(spill_report.arms_table(found))
    if found.restart is not None:
        console.print(spill_report.restart_words(found.restart), highlight=False)
    console.print(report.goals_table(found))
    console.print(f"\nreport: {out / 'spill.html'}, {out / 'spill.json'}", highlight=False, soft_wrap=True)
    command.raise_if_wrong(found, samples)
    return True


def write(found: spill_report.SpillReport, samples: list[report.ArmTokens], out: Path) -> None:
    """spill.json, spill.html, spill-samples.jsonl."""
    (out / "spill.json").write_bytes(report.to_json(found))
    (out / "spill-samples.jsonl").write_bytes(show.samples_json(samples))
    (out / "spill.html").write_text(spill_report.html(found, samples), encoding="utf-8")


def _announcement(chosen: Plan) -> str:
    size, block = chosen.sizes, chosen.spec.block_tokens
    without = [arm.name for arm in plan.ARMS if arm.disk and arm not in chosen.arms]
    left_out = f"; the sim has no disk tier, so {' and '.join(without)} are left out"
    return (
        f"{len(chosen.work.workload.order)} requests through {len(chosen.arms)} pools, {chosen.work.concurrency} in flight; "
        f"a device holds {(size.device_blocks - 1) * block:,} tokens, about a quarter of what the work needs, host memory "
        f"{plan.HOST} times as many"
    ) + (left_out if chosen.spec.engine is EngineKind.SIM else "")
