"""For all tests of the repository."""

from __future__ import annotations

import asyncio


def pytest_configure() -> None:
    """Say that the main thread has no event loop.

    Otherwise Python 3.11 makes one when looptime's plug-in asks for it, nobody closes it, and its ResourceWarning fails
    whichever test runs when it is collected.
    """
    asyncio.set_event_loop(None)
