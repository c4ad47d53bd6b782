"""One of several worker processes: `python -m prefixpool_router.worker SETTINGS_FILE WORKER SOCKET`, started by workers.py.

It ends when its parent does: the parent holds the other end of its standard input.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from prefixpool_router.drain import Draining
from prefixpool_router.processes import run, set_up, stop_on_signals
from prefixpool_router.serve import Place, Router
from prefixpool_router.settings import RouterSettings


def main() -> int:
    """Exit status as processes.run."""
    settings_file, worker, admin_socket = sys.argv[1:]
    settings = msgspec.json.decode(Path(settings_file).read_bytes(), type=RouterSettings)
    set_up(settings)
    return run(lambda: _serve(settings, Place(int(worker), Path(admin_socket))))


async def _serve(settings: RouterSettings, place: Place) -> int:
    router = Router(settings, place)
    stop_on_signals(router.draining)
    watch = asyncio.create_task(_watch_parent(router.draining), name="parent")
    try:
        return await router.serve()
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


async def _watch_parent(draining: Draining) -> None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    try:
        await reader.read()  # nothing is ever written: this ends when the parent's end closes
        draining.begin(hurry=True)
    finally:
        transport.close()


if __name__ == "__main__":
    sys.exit(main())
