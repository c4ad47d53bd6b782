"""How far a download is, in words and in coarse steps, so that it is told now and then and not all the time. Pure."""

from __future__ import annotations

from prefixpool.sizing.reasons import gib
from prefixpool.wire import Download


def step(download: Download, steps: int) -> int:
    """From 0 to `steps`, rounded down."""
    return min(steps, download.done_bytes * steps // download.total_bytes) if download.total_bytes else 0


def amount(download: Download, steps: int) -> str:
    """ "40 %, 3.2 GiB of 8.1 GiB": the same words during a whole step. Without a known size: "size not known yet"."""
    if not download.total_bytes:
        return "size not known yet"
    now = step(download, steps)
    return f"{now * 100 // steps} %, {gib(download.total_bytes * now // steps)} of {gib(download.total_bytes)}"
