"""CPU time that the gate itself spends on a request, around an application that does nothing.

Latency of a real engine cannot resolve tens of microseconds on a busy machine; the thread's own CPU time can.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prefixpool import names
from prefixpool_agent.gate import Gate
from prefixpool_agent.gate.app import GateConfig
from prefixpool_agent.gate_state import GateState

CHUNK = b'data: {"id":"x","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"word"}}]}\n\n'
ROUNDS = 40
REQUESTS = 50


def cpu_costs(bodies: dict[str, bytes], chunks: int = 100) -> dict[str, float]:
    """Microseconds for each body, answered in one chunk; and for each further chunk of a stream. Medians over rounds."""
    return asyncio.run(_costs(bodies, chunks))


async def _costs(bodies: dict[str, bytes], chunks: int) -> dict[str, float]:
    with TemporaryDirectory(prefix="pp") as folder:
        run_dir = Path(folder)
        (run_dir / "key").write_text("k\n")
        GateState.create(run_dir / names.RUN_GATE_STATE)
        server = await asyncio.start_unix_server(_drain, run_dir / names.RUN_NOTES_SOCK)
        app = _App()
        gate = Gate(app, GateConfig(run_dir, run_dir / "key", 1, 256))
        report = {f"{name}_us": await _difference_us(gate, app, body) for name, body in bodies.items()}
        one = report[f"{next(iter(bodies))}_us"]
        app.chunks = 1 + chunks
        many = await _difference_us(gate, app, next(iter(bodies.values())))
        report["stream_chunk_us"] = round((many - one) / chunks, 2)
        await gate._close()
        server.close()
        return report


async def _difference_us(gate: Any, app: Any, body: bytes) -> float:
    differences = []
    for _ in range(ROUNDS):
        bare = await _cpu_s(app, body)
        differences.append((await _cpu_s(gate, body) - bare) / REQUESTS)
    return round(statistics.median(differences) * 1e6, 1)


async def _cpu_s(app: Any, body: bytes) -> float:
    """CPU of this thread, the writer of notes included: the loop is left until it has nothing more to do."""
    began = time.thread_time()
    for _ in range(REQUESTS):
        client = _Client(body)
        headers = [(b"authorization", b"Bearer k"), (b"content-type", b"application/json"), (b"content-length", b"1")]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
        await app(scope, client.receive, client.send)
        await asyncio.sleep(0)
    return time.thread_time() - began


class _App:
    chunks = 1

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(self.chunks):
            await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Client:
    def __init__(self, body: bytes) -> None:
        self._body = body

    async def receive(self) -> Any:
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def send(self, message: Any) -> None:
        return


async def _drain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The agent; its reading is in this thread, too, so that costs are over-stated rather than under-stated."""
    while await reader.read(1 << 20):
        pass
    writer.close()
