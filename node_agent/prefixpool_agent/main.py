"""`prefixpool-agent`: builds everything and owns the order of start and stop."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

import aiohttp
import uvloop
import zmq.asyncio
from aiohttp import web
from prometheus_client import CollectorRegistry

from prefixpool import logs, names, note, wire
from prefixpool.errors import PrefixpoolError
from prefixpool.listening import bound
from prefixpool.settings import parse
from prefixpool_agent.agent import Agent
from prefixpool_agent.attachment import Parts
from prefixpool_agent.disk_follower import DiskFollower
from prefixpool_agent.download.state import model_folder
from prefixpool_agent.engine_client import EngineClient
from prefixpool_agent.engine_watch import EngineWatch
from prefixpool_agent.follower import Follower
from prefixpool_agent.gate.keys import KeyFile
from prefixpool_agent.load import LoadReporter
from prefixpool_agent.metrics import AgentMetrics
from prefixpool_agent.model_text import read_model
from prefixpool_agent.notes import Notes
from prefixpool_agent.publisher import Publisher
from prefixpool_agent.residency import Limits
from prefixpool_agent.server import Server
from prefixpool_agent.settings import AGENT_PREFIX, AgentSettings
from prefixpool_agent.supervisor_client import SupervisorClient

_DESCRIPTION: Final = """\
The agent of one replica: it follows an engine's KV events and requests, and tells every router which prefixes the engine's
cache holds, how busy it is, and what a token costs there. It also drains the replica. It is started, and started again, by
`prefixpool-worker`, which derives these settings from its own; run by hand, it attaches to a worker's run directory:

  prefixpool-agent --replica pool-0 --run-dir /run/pool-0 --model ./model --served-model-name model \\
                   --engine-key-file engine.key
"""
_EPILOG: Final = """\
Ask it (/info and /drain need the pool's key: -H "Authorization: Bearer $(head -1 engine.key)"):

  curl localhost:8101/readyz                    ready? if not, why; ?router=1: and does a router know its cache
  curl localhost:8101/metrics                   Prometheus
  curl localhost:8101/info                      what the replica is, and holds
  curl -X POST localhost:8101/drain -d '{"stop": false, "wait": true}'       fence, wait; DELETE lifts the fence
"""
ORIENTATION_S: Final = 2.0  # for a first look at the engine before the agent listens
SHUTDOWN_S: Final = 2.0  # for streams and answers when the agent ends

log = logging.getLogger(__name__)


async def run(settings: AgentSettings, stop: asyncio.Event) -> None:
    """Serve until `stop`. Raises PrefixpoolError or OSError if it cannot begin, and what ended a task that must not end."""
    async with build(settings) as tasks:
        stopping = asyncio.create_task(stop.wait(), name="stop")
        try:
            done, _ = await asyncio.wait({stopping, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopping}:
                task.result()
                raise RuntimeError(f"{task.get_name()} ended")
        finally:
            stopping.cancel()


@contextlib.asynccontextmanager
async def build(settings: AgentSettings) -> AsyncIterator[list[asyncio.Task[None]]]:
    """All parts, wired and started; undone in reverse order."""
    run_dir, key_file = Path(settings.run_dir), Path(settings.engine_key_file)
    registry = CollectorRegistry()
    metrics = AgentMetrics(registry)
    keys = KeyFile(key_file)
    text = await asyncio.to_thread(read_model, settings.engine, model_folder(run_dir, settings.model))
    if text.problem:
        log.warning("prefixes cannot be mapped, routers must guess", extra={"reason": text.problem})
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        context = zmq.asyncio.Context()
        stack.callback(context.destroy, linger=0)
        engine = EngineClient(session, settings.engine_url, key_file)
        welcome = wire.Welcome(
            replica=settings.replica,
            epoch=0,
            models=(settings.served_model_name,),
            block_tokens=settings.block_tokens,
            host_bytes=settings.host_kv_bytes,
            max_inflight=settings.max_inflight,
            template=text.template,
        )
        publisher = Publisher(welcome, lambda: follower.snapshot(), metrics)
        publisher.hold()  # until it is known what a running engine holds, or that none is running
        follower = Follower(
            publisher=publisher,
            metrics=metrics,
            command=lambda command: notes.send(command),
            nudge=lambda: reporter.nudge(),
            greeted=lambda hello: _greeted(hello, publisher.epoch, watch),
        )
        notes = Notes(run_dir / names.RUN_NOTES_SOCK, follower)
        disk = DiskFollower(run_dir, follower, shared=settings.disk_kv_shared)
        parts = Parts(run_dir, context, follower, notes, text, Limits(content_bytes=settings.text_bytes), disk)
        agent = Agent(
            settings, parts, engine=engine, supervisor=SupervisorClient(run_dir), publisher=publisher, metrics=metrics
        )
        reporter = LoadReporter(agent.load, publisher.tell)
        watch = EngineWatch(run_dir, engine, agent.saw)
        server = Server(
            view=agent,
            publisher=publisher,
            drain=agent.drain,
            keys=keys,
            registry=registry,
            drain_timeout_s=settings.drain_timeout_s,
        )
        stack.push_async_callback(agent.close)
        await notes.start()
        stack.push_async_callback(notes.stop)
        tasks = [
            asyncio.create_task(work, name=name)
            for name, work in (
                ("engine watch", watch.run()),
                ("residency", follower.run()),
                ("disk", disk.run()),
                ("load", reporter.run()),
                ("tick", agent.tick()),
                ("scrape", agent.scrape()),
            )
        ]
        stack.push_async_callback(_cancel, tasks)
        with contextlib.suppress(TimeoutError):  # routers that come at once shall not hear that a running engine is starting
            async with asyncio.timeout(ORIENTATION_S):
                await agent.oriented.wait()
        await _listen(stack, server.application(), settings)
        log.info("agent serves", extra={"replica": settings.replica, "port": settings.agent_port})
        yield tasks


def _greeted(hello: note.GateHello, epoch: int, watch: EngineWatch) -> None:
    """A gate of another engine start: the state file has the rest of the story."""
    if hello.epoch != epoch:
        watch.nudge()


async def _listen(stack: contextlib.AsyncExitStack, app: web.Application, settings: AgentSettings) -> None:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S, handler_cancellation=True)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    for sock in bound(settings.host, settings.agent_port):
        await web.SockSite(runner, sock).start()


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _until_signal(settings: AgentSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await run(settings, stop)


def main(argv: Sequence[str] | None = None) -> int:
    """Console script. 2: wrong settings, 1: could not run."""
    parser = argparse.ArgumentParser(
        prog="prefixpool-agent",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    try:
        settings = parse(
            AgentSettings, sys.argv[1:] if argv is None else argv, os.environ, prefix=AGENT_PREFIX, parser=parser
        )
    except PrefixpoolError as error:
        print(f"prefixpool-agent: {error}", file=sys.stderr)  # noqa: T201  there is no log yet
        return 2
    logs.setup(settings.log_level.value)
    # The picture is a large graph of long-lived objects; full collections of it would stall the loop for nothing.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    try:
        uvloop.run(_until_signal(settings))
    except (PrefixpoolError, OSError) as error:
        log.error("agent cannot run", extra={"error": str(error)})  # noqa: TRY400  the message says it all
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
