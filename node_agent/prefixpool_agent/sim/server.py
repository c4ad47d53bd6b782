"""Composition of the sim and its HTTP server: as a program (main.py) or inside another event loop."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import uvicorn
from prometheus_client import CollectorRegistry

from prefixpool import names
from prefixpool.errors import SettingsError
from prefixpool.listening import bound
from prefixpool_agent.sim.api import build_app
from prefixpool_agent.sim.disk import DiskTier
from prefixpool_agent.sim.engine import Engine
from prefixpool_agent.sim.events import EventPublisher
from prefixpool_agent.sim.metrics import SimMetrics
from prefixpool_agent.sim.scheduler import Scheduler
from prefixpool_agent.sim.serving import Models, Serving
from prefixpool_agent.sim.settings import SimSettings
from prefixpool_agent.sim.template import ChatTemplate
from prefixpool_agent.sim.tokenizer import SimTokenizer

SHUTDOWN_TIMEOUT_S: Final = 3  # for answers that say "abort" to reach their clients
_STARTUP_TIMEOUT_S: Final = 10


def build_serving(settings: SimSettings) -> Serving:
    """The whole engine behind its HTTP face. Raises SettingsError."""
    tokenizer = SimTokenizer()
    config = settings.scheduler()
    metrics = SimMetrics(
        CollectorRegistry(),
        model=settings.names[0],
        block_tokens=config.block_tokens,
        blocks=config.blocks,
        max_model_len=config.max_model_len,
    )
    engine = Engine(
        Scheduler(config, tokenizer, _disk_tier(settings)),
        settings.timing(),
        EventPublisher(settings.events()),
        metrics,
        time_scale=settings.time_scale,
    )
    models = Models(settings.model, settings.names, settings.adapters)
    return Serving(engine, tokenizer, ChatTemplate(renders_tools=not settings.ignore_tools), models)


def _disk_tier(settings: SimSettings) -> DiskTier | None:
    config = settings.disk()
    if config is None:
        return None
    tier = DiskTier(config, settings.model, settings.block_size)
    if run_dir := os.environ.get(names.ENV_RUN_DIR):
        Path(run_dir, names.RUN_DISK_FOLDER).write_text(str(tier.folder))  # for the agent
    return tier


def wrap(app: Any, middleware: tuple[str, ...]) -> Any:
    """Put middleware classes around the application, the first outermost. Raises SettingsError."""
    for path in reversed(middleware):
        app = _load(path)(app)
    return app


def _load(path: str) -> Callable[[Any], Any]:
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        found: Callable[[Any], Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(f"--middleware={path!r} cannot be loaded: {error}") from error
    return found


class SimServer(uvicorn.Server):
    """Ends like vLLM: when its engine fails, or by `stop()`, which answers running requests with `finish_reason` abort."""

    def __init__(self, settings: SimSettings, *, dev_mode: bool = True, handle_signals: bool = False) -> None:
        """Raises SettingsError. `handle_signals`: SIGTERM and SIGINT stop the server, which then returns."""
        self.serving = build_serving(settings)
        self._handle_signals = handle_signals
        self._stopping = asyncio.Event()
        self.ready = asyncio.Event()  # set when requests are accepted, or never will be
        super().__init__(
            uvicorn.Config(
                wrap(build_app(self.serving, dev_mode=dev_mode), settings.middleware),
                host=settings.host,
                port=settings.port,
                log_level="warning",
                access_log=False,
                lifespan="on",
                server_header=False,
                date_header=False,
                timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets or bound(self.config.host, self.config.port))
        finally:
            self.ready.set()

    async def main_loop(self) -> None:
        """Instead of uvicorn's, which wakes up ten times a second."""
        await self.on_tick(0)  # sets the default headers
        ends = [asyncio.create_task(event.wait()) for event in (self._stopping, self.serving.engine.failed)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in ends:
            task.cancel()
        await asyncio.gather(*ends, return_exceptions=True)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if self._handle_signals:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stop)
        yield

    def stop(self) -> None:
        """Abort, answer, close; `serve()` returns when that is done."""
        self.should_exit = True
        self._stopping.set()
        self.serving.engine.close()


@asynccontextmanager
async def running(settings: SimSettings) -> AsyncIterator[tuple[SimServer, str]]:
    """A sim in this event loop, on a free port; yields the server and its URL."""
    server = SimServer(settings)
    with socket.socket() as listener:
        listener.bind((settings.host, 0))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            async with asyncio.timeout(_STARTUP_TIMEOUT_S):
                await server.ready.wait()
            yield server, f"http://{settings.host}:{listener.getsockname()[1]}"
        finally:
            server.stop()
            await task
