"""Signals and the life of a router process: how it is told to stop, and what its exit status says."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Final

import uvloop
from prometheus_client import disable_created_metrics

from prefixpool import logs
from prefixpool.errors import SettingsError
from prefixpool_router.drain import Draining
from prefixpool_router.settings import RouterSettings

_log = logging.getLogger(__name__)
_YOUNG_OBJECTS: Final = (
    10_000  # that start a garbage collection; requests leave no cycles behind, so it finds next to nothing
)
_ENOUGH_FILES: Final = 8192  # every request in flight has two connections


def set_up(settings: RouterSettings) -> None:
    """What is set once for a whole process: log lines as the settings want them, the format of metrics."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # time stamps would double what is scraped
    logs.setup(settings.log_level, json=settings.log_format is logs.LogFormat.JSON)


def raise_file_limit() -> None:
    """To what this process and its children may have at most; says so if that is little."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError) as error:  # a sandbox may forbid it, and less will do for most
        _log.warning("the limit of open files could not be raised", extra={"error": str(error)})
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _ENOUGH_FILES:
        _log.warning("few files may be open: each request in flight takes two", extra={"limit": soft})


def stop_on_signals(draining: Draining) -> None:
    """SIGTERM drains; SIGINT, a person's Ctrl-C, drains in a hurry. Call inside the event loop."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, draining.begin)
    loop.add_signal_handler(signal.SIGINT, lambda: draining.begin(hurry=True))


def run(work: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Exit status of a program: 0 done, 1 answers were cut off, 2 it cannot work like this."""
    gc.freeze()  # what was imported stays, and need not be looked at
    gc.set_threshold(_YOUNG_OBJECTS)
    try:
        return 1 if uvloop.run(work()) else 0
    except (SettingsError, OSError) as error:
        sys.stderr.write(f"prefixpool-router: {error}\n")
        return 2
