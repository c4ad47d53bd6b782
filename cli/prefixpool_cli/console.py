"""Where commands print: as wide as the terminal; where there is none (pipes, logs), wide enough for our tables."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Final

from rich.console import Console

WIDTH_WITHOUT_TERMINAL: Final = 140


class PipeConsole(Console):
    """If nobody reads any more (`prefixpool up | head`), a running command is ended in order, like by SIGTERM."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        try:
            asyncio.get_running_loop()
        except RuntimeError:  # nothing is to be cleaned up
            raise SystemExit(1) from None
        signal.raise_signal(signal.SIGTERM)  # interrupt.run is there to hear it


def console() -> Console:
    """Standard output."""
    found = PipeConsole()
    return found if found.is_terminal else PipeConsole(width=WIDTH_WITHOUT_TERMINAL)
