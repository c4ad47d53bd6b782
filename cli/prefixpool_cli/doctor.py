"""`prefixpool doctor`: asks a router and all agents, and names what is wrong."""

from __future__ import annotations

import asyncio

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table

from prefixpool import engine_key
from prefixpool_cli.admin import AdminClient, AgentAnswer, ask_agent
from prefixpool_cli.console import shown
from prefixpool_cli.findings import Finding, Severity, examine
from prefixpool_router.state import StateReport


async def doctor(admin: str, key_file: str, console: Console, *, as_json: bool) -> bool:
    """False if anything is broken; warnings alone are no failure.

    Raises CliError if the router does not answer, SettingsError for a key file without a key.
    """
    key = engine_key.read_sent(key_file) if key_file else ""
    async with aiohttp.ClientSession() as http:
        state = await AdminClient(http, admin).state()
        agents = await _agents(http, state, key) if key else {}
    found = examine(state, agents)
    if as_json:
        console.print_json(msgspec.json.encode(found).decode())
    else:
        _tell(found, state, console, asked=bool(key))
    return all(finding.severity is not Severity.ERROR for finding in found)


async def _agents(http: aiohttp.ClientSession, state: StateReport, key: str) -> dict[str, AgentAnswer]:
    urls = {r.name: r.agent for worker in state.workers for r in worker.replicas if r.agent}
    answers = await asyncio.gather(*(ask_agent(http, url, key) for url in urls.values()))
    return dict(zip(urls, answers, strict=True))


def _tell(found: list[Finding], state: StateReport, console: Console, *, asked: bool) -> None:
    console.print(_replicas(state))
    if not asked:
        console.print("agents were not asked: give --engine-key-file to check them, too", style="dim")
    if not found:
        console.print("[green]nothing is wrong[/]")
    for finding in found:
        colour = "red" if finding.severity is Severity.ERROR else "yellow"
        console.print(
            f"[bold {colour}]{finding.severity} {finding.cause}[/] {shown(f'{finding.where}: {finding.words}')}",
            highlight=False,
        )
        console.print(shown(f"  → {finding.advice}"), highlight=False)


def _replicas(state: StateReport) -> Table:
    table = Table(title="replicas", title_justify="left")
    for column in ("router", "replica", "usable", "knowledge", "engine"):
        table.add_column(column)
    for column in ("in flight", "boundaries", "trust"):
        table.add_column(column, justify="right")
    for worker in state.workers:
        for r in worker.replicas:
            table.add_row(
                shown(f"{worker.name}/{worker.worker}"),
                shown(r.name),
                "yes" if r.usable else "no",
                f"{r.mode} ({r.account})",
                str(r.engine_state or "unknown"),
                str(r.inflight),
                f"{r.boundaries:,}",
                f"{r.trust:.2f}",
            )
    return table
