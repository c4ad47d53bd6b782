"""`--workers N`: N processes share the client port (SO_REUSEPORT); this parent starts them, restarts them, tells of them.

Each worker is a whole router: own agent streams, own index. Nothing is shared, so nothing can be inconsistent, and one that
dies, or hangs and is killed, takes only its own connections with it. The parent serves no client; it owns the admin port and
merges what the workers tell it over unix sockets in a private directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
from aiohttp import web

from prefixpool import private_directory
from prefixpool.listening import bound
from prefixpool.silence import Silence
from prefixpool_router.admin import admin_app
from prefixpool_router.drain import Draining
from prefixpool_router.metrics import WorkersMetrics
from prefixpool_router.processes import stop_on_signals
from prefixpool_router.serve import Router
from prefixpool_router.settings import RouterSettings
from prefixpool_router.workers_view import WorkersView

_log = logging.getLogger(__name__)
_FIRST_PAUSE_S: Final = 0.2  # before a dead worker is started again; doubles
_LONGEST_PAUSE_S: Final = 10.0
_STEADY_S: Final = 30.0  # a worker that lived so long starts again with the first pause
_KILL_AFTER_S: Final = 5.0  # beyond the drain's own deadlines
_LOOK_S: Final = 5.0  # between two questions whether a worker is alive
HUNG_S: Final = 60.0  # a worker that is silent for so long is killed: the kernel goes on giving it connections


async def serve_with_workers(settings: RouterSettings) -> int:
    """Until drained; the number of workers that did not end well. Raises OSError if a port is taken, SettingsError."""
    Router(settings)  # complain once of what cannot work, not in every worker
    draining = Draining()
    stop_on_signals(draining)
    with _private_directory() as directory, _reserved_port(settings) as port:
        settings = msgspec.structs.replace(settings, port=port)
        workers = Workers(settings, directory, draining)
        async with _admin(settings, workers.view) as admin_port:
            _log.info("serving", extra={"workers": settings.workers, "port": port, "admin_port": admin_port})
            return await workers.run()


class Workers:
    """The child processes of one router."""

    def __init__(self, settings: RouterSettings, directory: Path, draining: Draining) -> None:
        self._settings = settings
        self._draining = draining
        self._settings_file = directory / "settings.json"
        self._settings_file.write_bytes(msgspec.json.encode(of_one_worker(settings)))
        self._sockets = {worker: directory / f"{worker}.sock" for worker in range(settings.workers)}
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._metrics = WorkersMetrics()
        self.view = WorkersView(self._sockets, self._metrics, draining)

    async def run(self) -> int:
        """Until all have ended after a drain; how many ended badly."""
        keepers = [asyncio.create_task(self._keep(worker), name=f"worker {worker}") for worker in self._sockets]
        try:
            await self._draining.wait()
            async with asyncio.timeout(self._deadline_s()):
                await self._stop(keepers)
        except TimeoutError:
            _log.error("workers did not end in time, killing them")
        finally:
            self._signal(signal.SIGKILL)
            ended = await asyncio.gather(*keepers, return_exceptions=True)
        return sum(1 for status in ended if status != 0)

    def _deadline_s(self) -> float:
        return self._settings.drain_accept_s + self._settings.drain_timeout_s + _KILL_AFTER_S

    async def _stop(self, keepers: list[asyncio.Task[int]]) -> None:
        """Hand on what this process was told: a drain, and perhaps later that it is urgent."""
        self._signal(signal.SIGTERM)
        hurry = asyncio.create_task(self._hurry(), name="hurry")
        try:
            await asyncio.wait(keepers)
        finally:
            hurry.cancel()
            await asyncio.gather(hurry, return_exceptions=True)

    async def _hurry(self) -> None:
        await self._draining.hurried()
        self._signal(signal.SIGINT)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):  # it ended this moment
                    process.send_signal(number)

    async def _keep(self, worker: int) -> int:
        """Start a worker again whenever it dies, until the drain; its last exit status."""
        pause_s = _FIRST_PAUSE_S
        loop = asyncio.get_running_loop()
        while True:
            started_s = loop.time()
            status = await self._one_life(worker)
            if self._draining.begun:
                return status
            self._metrics.restarts.labels(str(worker)).inc()
            pause_s = _FIRST_PAUSE_S if loop.time() - started_s > _STEADY_S else pause_s
            _log.error("worker died", extra={"worker": worker, "status": status, "again_in_s": pause_s})
            if await self._draining.begun_within(pause_s):
                return status
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    async def _one_life(self, worker: int) -> int:
        path = self._sockets[worker]
        path.unlink(missing_ok=True)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "prefixpool_router.worker", str(self._settings_file), str(worker), str(path)),
            stdin=asyncio.subprocess.PIPE,  # never written to; closes when this process ends, however it ends
            start_new_session=True,  # a terminal's Ctrl-C reaches the parent only, which passes it on
        )
        self._processes[worker] = process
        if self._draining.begun:
            process.terminate()
        watch = asyncio.create_task(self._kill_if_hung(worker, process), name=f"watch of worker {worker}")
        try:
            return await process.wait()
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _kill_if_hung(self, worker: int, process: asyncio.subprocess.Process) -> None:
        await until_hung(lambda: self.view.answers(worker))
        _log.error("worker hangs, killing it", extra={"worker": worker, "silent_s": HUNG_S})
        process.kill()


async def until_hung(answers: Callable[[], Awaitable[bool]]) -> None:
    """Returns when a worker has answered nothing for HUNG_S, from its start on."""
    loop = asyncio.get_running_loop()
    silence = Silence(loop.time(), allowed_s=HUNG_S)
    while True:
        await asyncio.sleep(_LOOK_S)
        if await answers():
            silence.answered(loop.time())
        elif silence.missed(loop.time()):
            return


def of_one_worker(settings: RouterSettings) -> RouterSettings:
    """What is allowed to all workers together is divided among them; each gets something."""
    if not settings.max_inflight:
        return settings
    return msgspec.structs.replace(settings, max_inflight=max(1, settings.max_inflight // settings.workers))


@contextlib.contextmanager
def _private_directory() -> Iterator[Path]:
    directory = private_directory.make(tempfile.gettempdir(), "prefixpool-router-")
    try:
        yield directory.path
    finally:
        with contextlib.suppress(OSError):  # what cannot be removed stays; it is none of the clients' business
            directory.remove()


@contextlib.contextmanager
def _reserved_port(settings: RouterSettings) -> Iterator[int]:
    """The client port, bound but not listening: port 0 becomes one number for all, and a taken port is found out at once."""
    with contextlib.ExitStack() as reserved:
        sockets = [reserved.enter_context(sock) for sock in bound(settings.host, settings.port, shared=True)]
        yield int(sockets[0].getsockname()[1])


@contextlib.asynccontextmanager
async def _admin(settings: RouterSettings, view: WorkersView) -> AsyncIterator[int]:
    runner = web.AppRunner(admin_app(view), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        for sock in bound(settings.admin_host, settings.admin_port):
            await web.SockSite(runner, sock).start()
        async with view:
            yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
