"""One router program of a local pool: whether it answers, and waiting until clients may come."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import aiohttp
import msgspec

from prefixpool import names
from prefixpool.listening import reachable
from prefixpool.silence import Silence
from prefixpool_cli.errors import PoolError
from prefixpool_cli.pool_files import tail
from prefixpool_cli.pool_process import Process
from prefixpool_cli.pool_watch import Progress, Stage

ANSWER_S: Final = 5.0  # a router of several processes waits 2 s for one that is silent
START_S: Final = 60.0  # until a process that starts answers anything; imports take long on a loaded machine
TELL_S: Final = 3.0  # what is waited for is no news before
_POLL_S: Final = 0.05


class _Ready(msgspec.Struct, frozen=True):
    ready: bool = False
    why: str = ""


class Router:
    """`ports`: for clients, and of the admin side. `process`: None before its first start."""

    def __init__(self, name: str, host: str, ports: tuple[int, int], log: Path) -> None:
        self.name = name
        self.ports = ports
        self.log = log
        self.url = f"http://{reachable(host)}:{ports[0]}"
        self.admin_url = f"http://127.0.0.1:{ports[1]}"
        self.process: Process | None = None

    @property
    def ended(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.process.returncode if self.process is not None else None

    async def answers(self, http: aiohttp.ClientSession) -> bool:
        """Whether its event loop turns."""
        return await self._ask(http, names.PATH_HEALTHZ) is not None

    async def until_ready(self, http: aiohttp.ClientSession, progress: Progress, timeout_s: float) -> None:
        """Tells what it waits for. Raises PoolError if the process ends or hangs, or is not ready in time."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        silence = Silence(began_s, allowed_s=START_S)
        while True:
            said = await self._ask(http, names.PATH_READYZ)
            now_s = loop.time()
            if said is not None and said.ready:
                progress(Stage(self.name, "ready", 1.0, now_s - began_s, ready=True))
                return
            if self.ended is not None:
                raise self._failure(f"ended with code {self.ended}")
            if said is not None:
                silence.answered(now_s)
                if now_s - began_s >= TELL_S:
                    progress(Stage(self.name, f"not ready yet: {said.why}", 0.5, now_s - began_s))
            elif silence.missed(now_s):
                raise self._failure(f"does not answer after {START_S:.0f} s")
            if now_s - began_s > timeout_s:
                raise self._failure(f"is not ready after {timeout_s:.0f} s{f': {said.why}' if said else ''}")
            await asyncio.sleep(_POLL_S)

    def _failure(self, what: str) -> PoolError:
        return PoolError(f"{self.name} {what}", tail(self.log))

    async def _ask(self, http: aiohttp.ClientSession, path: str) -> _Ready | None:
        """None: no answer, or none that makes sense."""
        try:
            async with http.get(self.admin_url + path, timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as answer:
                return msgspec.json.decode(await answer.read(), type=_Ready)
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
            return None
