"""`prefixpool-sim`: builds everything, serves until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
import uvloop
from prometheus_client import CollectorRegistry

from prefixpool import settings as settings_module
from prefixpool.errors import SettingsError
from prefixpool_agent.sim.api import build_app
from prefixpool_agent.sim.engine import Engine
from prefixpool_agent.sim.events import EventPublisher
from prefixpool_agent.sim.metrics import SimMetrics
from prefixpool_agent.sim.scheduler import Scheduler
from prefixpool_agent.sim.serving import Models, Serving
from prefixpool_agent.sim.settings import ENV_PREFIX, SimSettings
from prefixpool_agent.sim.template import ChatTemplate
from prefixpool_agent.sim.tokenizer import SimTokenizer

SHUTDOWN_TIMEOUT_S = 3  # for answers that say "abort" to reach their clients


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
        Scheduler(config, tokenizer),
        settings.timing(),
        EventPublisher(settings.events()),
        metrics,
        time_scale=settings.time_scale,
    )
    models = Models(settings.model, settings.names, settings.adapters)
    return Serving(engine, tokenizer, ChatTemplate(renders_tools=not settings.ignore_tools), models)


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


class _Server(uvicorn.Server):
    """Ends like vLLM: at SIGTERM running requests are aborted, answered with `finish_reason` abort, and the exit is 0."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self._engine = engine

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        yield

    def _stop(self) -> None:
        self.should_exit = True
        self._engine.close()


def main() -> None:
    """Entry point."""
    dev_mode = os.environ.get("VLLM_SERVER_DEV_MODE", "1") == "1"  # vLLM's variable, on unless it says no
    parser = argparse.ArgumentParser(prog="prefixpool-sim", description="An engine that speaks vLLM's API without a model.")
    try:
        settings = settings_module.parse(SimSettings, sys.argv[1:], os.environ, prefix=ENV_PREFIX, parser=parser)
        serving = build_serving(settings)
        app = wrap(build_app(serving, dev_mode=dev_mode), settings.middleware)
    except SettingsError as error:
        sys.exit(f"prefixpool-sim: {error}")
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_level="warning",
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_Server(config, serving.engine).serve())


if __name__ == "__main__":
    main()
