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
from prefixpool_cli.console import shown
from prefixpool_cli.demo import command, report, show, workload
from prefixpool_cli.demo.client import RequestFailedError
from prefixpool_cli.demo.spill import plan
from prefixpool_cli.demo.spill import report as spill_report
from prefixpool_cli.demo.spill.passing import Work
from prefixpool_cli.demo.spill.show import Plan, Shown, SpillShow
from prefixpool_cli.errors import CliError
from prefixpool_cli.plan import find_model

FLOAT32: Final = 2  # times what a token takes in the two bytes that `bytes_per_token` counts with


def planned(
    engine: EngineKind, model: str, out: Path, requests: int, arms: list[str], concurrency: int, *, check_output: bool
) -> Plan:
    """Raises CliError or SizingError for what would make the demo fail later."""
    chosen = plan.arms(arms, engine)
    work = Work(workload.first(workload.load(), requests or plan.REQUESTS), concurrency or plan.CONCURRENCY)
    token_bytes = _token_bytes(engine, model)
    exact_bytes = token_bytes if engine is EngineKind.SIM else FLOAT32 * token_bytes
    size = plan.sizes(work.workload, engine, command.BLOCK_TOKENS, exact_bytes, command.MAX_MODEL_LEN)
    spec = command.pool_spec(engine, model, max(arm.replicas for arm in chosen), size.device_blocks, out)
    command.prepare(spec, out)
    # Times are those of the type that users run the model in; only answers need float32 to be compared.
    timed = msgspec.structs.replace(spec, worker_args=())
    return Plan(spec, size, timed, plan.timed_sizes(command.BLOCK_TOKENS, token_bytes), work, chosen, check_output)


def _token_bytes(engine: EngineKind, model: str) -> int:
    return sim.KV_TOKEN_BYTES if engine is EngineKind.SIM else bytes_per_token(find_model(model), KvDtype.AUTO)


async def run(chosen: Plan, out: Path, console: Console) -> bool:
    """False if a goal was missed. Raises CliError if a request failed, an answer was wrong, or nothing can be reported."""
    console.print(_announcement(chosen), highlight=False)
    async with aiohttp.ClientSession() as http:
        try:
            shown = await SpillShow(chosen, http, out, console).run()
        except RequestFailedError as error:
            raise CliError(f"the demo could not be judged: {error}") from error
    with command.writing(out):
        write(shown, out)
    return told(shown.report, shown.arms, out, console)


def told(found: spill_report.SpillReport, samples: list[report.ArmTokens], out: Path, console: Console) -> bool:
    """Print the report; False if a goal was missed. Raises CliError if a request failed or an answer was wrong."""
    console.print(spill_report.arms_table(found))
    if found.restart is not None:
        console.print(spill_report.restart_words(found.restart), highlight=False)
    if found.ttft:
        console.print(spill_report.ttft_table(found))
    console.print(report.goals_table(found))
    console.print(shown(f"\nreport: {out / 'spill.html'}, {out / 'spill.json'}"), highlight=False, soft_wrap=True)
    command.raise_if_wrong(found, samples)
    return command.told(found.goals, console)


def write(shown: Shown, out: Path) -> None:
    """spill.json, spill.html, and spill-samples.jsonl: one line a request or probe."""
    (out / "spill.json").write_bytes(report.to_json(shown.report))
    lines = [msgspec.json.encode({"arm": plan.TIMES.name, **probe._asdict()}) + b"\n" for probe in shown.probes]
    (out / "spill-samples.jsonl").write_bytes(show.samples_json(shown.arms) + b"".join(lines))
    (out / "spill.html").write_text(spill_report.html(shown.report, shown.arms), encoding="utf-8")


def _announcement(chosen: Plan) -> str:
    size, block = chosen.sizes, chosen.spec.block_tokens
    return (
        f"{len(chosen.work.workload.order)} requests through each pool, {chosen.work.concurrency} in flight; a device holds "
        f"{(size.device_blocks - 1) * block:,} tokens, about a quarter of what the work needs, host memory {plan.HOST} "
        f"times as many"
    )
