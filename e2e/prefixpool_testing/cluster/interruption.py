"""How a run of tests ends before its time."""

from __future__ import annotations

import signal


def sigterm_as_ctrl_c() -> None:
    """SIGTERM ends this run of pytest in order, fixtures and all. The kernel would end a node's processes, not its cable."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
