"""Running a command so that Ctrl-C, SIGTERM and a closed terminal let it clean up."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from rich.console import Console


class CutShortError(Exception):
    """The user stopped the command, and it has cleaned up."""


def run(main: Coroutine[Any, Any, bool], console: Console) -> bool:
    """The command's result. Raises CutShortError. Further signals while it cleans up are acknowledged, not obeyed."""
    before = signal.getsignal(signal.SIGINT)
    try:
        return asyncio.run(_guarded(main, console))
    finally:
        signal.signal(signal.SIGINT, before)  # the loop puts Python's own there, which would show a traceback


async def _guarded(main: Coroutine[Any, Any, bool], console: Console) -> bool:
    task = asyncio.ensure_future(main)
    interrupted = False

    def on_signal() -> None:
        nonlocal interrupted
        first, interrupted = not interrupted, True
        if first:
            task.cancel()  # before a word of it, because the terminal may be gone
        with suppress(OSError):
            console.print("\nstopping, this takes a few seconds ..." if first else "still stopping ...")

    loop = asyncio.get_running_loop()
    signals = _signals()
    for signum in signals:
        loop.add_signal_handler(signum, on_signal)
    try:
        return await task
    except asyncio.CancelledError:
        if interrupted:
            raise CutShortError from None
        raise
    finally:
        for signum in signals:
            loop.remove_signal_handler(signum)


def _signals() -> tuple[signal.Signals, ...]:
    """Those that end a command. Under nohup a closed terminal does not."""
    ending = (signal.SIGINT, signal.SIGTERM)
    return ending if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*ending, signal.SIGHUP)
