"""Running a command so that Ctrl-C and SIGTERM let it clean up."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

from rich.console import Console


class CutShortError(Exception):
    """The user stopped the command, and it has cleaned up."""


def run(main: Coroutine[Any, Any, bool], console: Console) -> bool:
    """The command's result. Raises CutShortError. Further signals while it cleans up are acknowledged, not obeyed."""
    return asyncio.run(_guarded(main, console))


async def _guarded(main: Coroutine[Any, Any, bool], console: Console) -> bool:
    task = asyncio.ensure_future(main)
    interrupted = False

    def on_signal() -> None:
        nonlocal interrupted
        console.print("\nstopping, this takes a few seconds ..." if not interrupted else "still stopping ...")
        if not interrupted:
            interrupted = True
            task.cancel()

    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, on_signal)
    try:
        return await task
    except asyncio.CancelledError:
        if interrupted:
            raise CutShortError from None
        raise
    finally:
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(signum)
