"""Entry: `prefixpool`, `python -m prefixpool_cli`. Light, so that Ctrl-C works while everything else is still imported.

An exception would not do: whatever catches all of them while it is imported (C extensions, optional parts) swallows it.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Final

INTERRUPTED: Final = 130  # as shells have it


def _leave(_number: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)  # nothing has been started yet: `interrupt` takes over before anything is


def main() -> None:
    """Does not return."""
    signal.signal(signal.SIGINT, _leave)
    from prefixpool_cli.main import main as command  # takes a second

    command()


if __name__ == "__main__":
    main()
