"""vLLM's API server runs on uvloop, which differs from asyncio where a peer dies."""

from __future__ import annotations

import asyncio
from pathlib import Path

from prefixpool import note
from prefixpool_agent.gate.link import NoteLink


async def test_notes_go_on_after_a_write_to_a_transport_that_uvloop_has_closed(tmp_path: Path) -> None:
    """The agent was killed while a note was on its way: uvloop raised RuntimeError, and no agent was ever told again."""
    greeted = asyncio.Event()
    connections = 0

    async def agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readexactly(4)
        if connections == 1:
            link._ring.take = closed  # type: ignore[method-assign]  # the next write meets a closed transport
            link.put(note.Counts(inflight=0, fenced=False))
        else:
            greeted.set()
        await reader.read()
        writer.close()

    def closed(max_bytes: int = 0) -> bytes:
        del link._ring.take  # only once
        raise RuntimeError("unable to perform operation on <UnixTransport closed=True>; the handler is closed")

    link = NoteLink(
        tmp_path / "notes.sock",
        hello=lambda dropped: note.GateHello(version=note.VERSION, epoch=1, pid=1, dropped=dropped),
        on_command=lambda command: None,
        on_tick=lambda: None,
    )
    server = await asyncio.start_unix_server(agent, tmp_path / "notes.sock")
    task = asyncio.create_task(link.run())
    async with asyncio.timeout(5):
        await greeted.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    server.close()
