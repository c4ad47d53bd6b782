"""A router program of its own, before whatever replicas a test chooses: fake agents, scripted backends, cut connections."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from prefixpool import names
from prefixpool_cli.admin import AdminClient
from prefixpool_cli.pool_spec import MemberRow, members_json
from prefixpool_router.state import ReplicaReport, RouterReport
from prefixpool_testing.eventually import eventually
from prefixpool_testing.pool_client import PoolClient

MODEL: Final = "model"
_START_S: Final = 30.0
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class Ready(NamedTuple):
    """What `/readyz` says."""

    ready: bool
    words: str


class RouterProgram:
    """One running router process. `client` speaks to it, without a key."""

    def __init__(
        self, process: asyncio.subprocess.Process, port: int, admin: int, members: Path, http: aiohttp.ClientSession
    ) -> None:
        self.process = process
        self.members_file = members
        self.admin_url = f"http://127.0.0.1:{admin}"
        self.http = http
        self.client = PoolClient(self.http, f"http://127.0.0.1:{port}", "", MODEL)
        self._admin = AdminClient(self.http, self.admin_url)

    def tell(self, rows: Sequence[MemberRow]) -> None:
        """Another set of members."""
        fresh = self.members_file.with_suffix(".new")
        fresh.write_bytes(members_json(rows, agents=True))
        fresh.replace(self.members_file)

    async def report(self) -> RouterReport:
        (report,) = (await self._admin.state()).workers
        return report

    async def view(self, name: str) -> ReplicaReport | None:
        """One replica as the router sees it; None if it is no member."""
        return next((view for view in (await self.report()).replicas if view.name == name), None)

    async def until(self, name: str, *, usable: bool, mode: str = "", within_s: float) -> None:
        """Until the router judges a replica so."""

        async def check() -> bool:
            view = await self.view(name)
            return view is not None and view.usable is usable and (not mode or view.mode == mode)

        await eventually(check, within_s=within_s, what=f"{name} {'' if usable else 'not '}usable {mode}")

    async def ready(self) -> Ready:
        async with self.http.get(self.admin_url + names.PATH_READYZ) as answer:
            return Ready(answer.status == 200, await answer.text())

    async def until_ready(self) -> None:
        async def check() -> bool:
            return (await self.ready()).ready

        await eventually(check, what="the router is ready")

    async def metric(self, name: str) -> float:
        """Sum of its samples."""
        async with self.http.get(self.admin_url + names.PATH_METRICS) as answer:
            families = text_string_to_metric_families(await answer.text())
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)

    @property
    def rss_bytes(self) -> int:
        """Resident memory."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * _PAGE


@asynccontextmanager
async def router_program(folder: Path, rows: Sequence[MemberRow], *flags: str) -> AsyncIterator[RouterProgram]:
    """Started with these members, and ready for clients."""
    members = folder / "members.json"
    members.write_bytes(members_json(rows, agents=True))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "prefixpool_router.main", "--members", str(members), "--port", "0", "--admin-port", "0"),
        *("--log-format", "json", "--drain-accept-s", "0", "--drain-timeout-s", "1", "--members-interval-s", "0.1", *flags),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    reading: asyncio.Task[bytes] | None = None
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            line = await asyncio.wait_for(_serving(process.stderr), _START_S)
            reading = asyncio.create_task(process.stderr.read())
            router = RouterProgram(process, line.port, line.admin_port, members, http)
            await router.until_ready()
            yield router
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        if reading is not None:
            await reading


class _Line(msgspec.Struct):
    message: str
    port: int = 0
    admin_port: int = 0


async def _serving(log: asyncio.StreamReader) -> _Line:
    while (line := msgspec.json.decode(await log.readline(), type=_Line)).message != "serving":
        pass
    return line
