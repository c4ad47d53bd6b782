"""Two thousand concurrent streams through one router process: every byte compared, added gap, health, memory.

A backend process sends each stream two chunks a second, each with its own number and the time of sending; the client
process keeps `--streams` streams open for at least `--seconds`, each at least 30 s long, checks every byte and takes the
delay from the backend's clock (one machine, one monotonic clock). Health is asked once a second; RSS is read from /proc.
Writes build/bench/streams.json. The figures are reported, not judged; any wrong byte or error ends with exit status 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import cast

import uvloop

INTERVAL_S = 0.5
STREAM_S = 31.0
CHUNKS = int(STREAM_S / INTERVAL_S)
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_CHUNK = re.compile(rb'data: \{"stream":(\d+),"n":(\d+),"at":(\d+\.\d+),"pad":"x{40}"\}\n\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--backend", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    if args.backend:
        uvloop.run(_serve(args.backend))
    else:
        sys.exit(uvloop.run(_bench(args.streams, args.seconds)))


# -- backend --------------------------------------------------------------------------------------------------------------


class Backend(asyncio.Protocol):
    """Reads a request, answers health at once, and a chat request with a paced stream."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._buffer = b""
        self._timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        if not found or (length and len(body) < int(length[1])):
            return
        self._buffer = b""
        if head.startswith(b"GET"):
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
            return
        number = re.search(rb"stream number (\d+)", body)
        self._transport.write(_HEAD)
        self._send(int(number[1]) if number else 0, 0)

    def _send(self, stream: int, n: int) -> None:
        if n == CHUNKS:
            self._transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            return
        text = b'data: {"stream":%d,"n":%d,"at":%.6f,"pad":"%s"}\n\n' % (stream, n, time.monotonic(), b"x" * 40)
        self._transport.write(b"%x\r\n%s\r\n" % (len(text), text))
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._send, stream, n + 1)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer:
            self._timer.cancel()


async def _serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Backend, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


# -- client ---------------------------------------------------------------------------------------------------------------


class Client(asyncio.Protocol):
    """One stream: checks each chunk as it comes."""

    def __init__(self, number: int, gaps: list[float], done: asyncio.Future[str]) -> None:
        self._number, self._gaps, self._done = number, gaps, done
        self._buffer, self._next, self._in_body, self._ended = b"", 0, False, False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        message = f"Please tell me a story, stream number {self._number} of a long row of streams."
        body = json.dumps({"model": "bench", "stream": True, "messages": [{"role": "user", "content": message}]})
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        self._buffer += data
        if not self._in_body:
            head, found, rest = self._buffer.partition(b"\r\n\r\n")
            if not found:
                return
            if b" 200 " not in head.split(b"\r\n")[0]:
                self._end(f"stream {self._number}: {head[:80]!r}")
                return
            self._in_body, self._buffer = True, rest
        while self._take(now):
            pass

    def _take(self, now: float) -> bool:
        """One HTTP chunk: exactly the one that the backend wrote, or the end."""
        size, found, rest = self._buffer.partition(b"\r\n")
        if not found or len(rest) < int(size, 16) + 2:
            return False
        text, self._buffer = rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        if not text:
            self._end("" if self._ended else f"stream {self._number}: ended at chunk {self._next}")
            return False
        if self._next == CHUNKS and text == b"data: [DONE]\n\n":
            self._ended = True
            return True
        match = _CHUNK.fullmatch(text)
        if match is None or (int(match[1]), int(match[2])) != (self._number, self._next):
            self._end(f"stream {self._number}: wrong bytes at chunk {self._next}: {text[:120]!r}")
            return False
        self._gaps.append(now - float(match[3]))
        self._next += 1
        return True

    def _end(self, error: str) -> None:
        if not self._done.done():
            self._done.set_result(error)
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(f"stream {self._number}: connection lost at chunk {self._next}: {exc!r}")


async def _bench(streams: int, seconds: int) -> int:
    port, admin, backend = _free_port(), _free_port(), _free_port()
    router = Path(sys.executable).parent / "prefixpool-router"
    replica = f"bench-0=http://127.0.0.1:{backend}"
    flags = ["--port", str(port), "--admin-port", str(admin), "--replica", replica, "--log-level", "warning"]
    children = [
        subprocess.Popen([sys.executable, __file__, "--backend", str(backend)]),
        subprocess.Popen([str(router), *flags, "--max-inflight", str(streams * 2)]),
    ]
    try:
        await _wait_until_up(admin)
        report = await _run(streams, seconds, port, admin, children[1].pid)
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.wait(timeout=20)
    out = Path("build/bench/streams.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return 1 if report["errors"] else 0


async def _run(streams: int, seconds: int, port: int, admin: int, pid: int) -> dict[str, object]:
    gaps: list[float] = []
    errors: list[str] = []
    health: list[float] = []
    rss: list[tuple[float, int]] = []
    started = time.monotonic()
    watcher = asyncio.create_task(_watch(admin, pid, health, rss, started))
    deadline = started + seconds
    await asyncio.gather(*(_lane(lane, streams, port, deadline, gaps, errors) for lane in range(streams)))
    watcher.cancel()
    await asyncio.gather(watcher, return_exceptions=True)
    minute = [value for at, value in rss if at >= 60] or [value for _, value in rss]
    return {
        "streams": streams,
        "chunks": len(gaps),
        "errors": len(errors),
        "first_errors": errors[:5],
        "gap_p50_s": round(statistics.median(gaps), 4),
        "gap_p99_s": round(statistics.quantiles(gaps, n=100)[98], 4),
        "gap_max_s": round(max(gaps), 4),
        "healthz_max_s": round(max(health), 4),
        "rss_bytes": max(value for _, value in rss),
        "rss_growth_after_first_minute": round(max(minute) / minute[0] - 1, 4),
        "seconds": round(time.monotonic() - started, 1),
    }


async def _lane(lane: int, lanes: int, port: int, deadline: float, gaps: list[float], errors: list[str]) -> None:
    """One stream after the other until the deadline; starts are spread over the first five seconds."""
    await asyncio.sleep(5.0 * lane / lanes)
    number = lane
    while True:
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def client(number: int = number, done: asyncio.Future[str] = done) -> Client:
            return Client(number, gaps, done)

        try:
            await asyncio.get_running_loop().create_connection(client, "127.0.0.1", port)
            error = await asyncio.wait_for(done, STREAM_S * 3)
        except (OSError, TimeoutError) as failure:
            error = f"stream {number}: {failure!r}"
        if error:
            errors.append(error)
        number += lanes
        if time.monotonic() >= deadline:
            return


async def _watch(admin: int, pid: int, health: list[float], rss: list[tuple[float, int]], started: float) -> None:
    while True:
        asked = time.monotonic()
        await asyncio.to_thread(_healthy, admin)
        health.append(time.monotonic() - asked)
        status = Path(f"/proc/{pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        rss.append((asked - started, int(found[1]) * 1024 if found else 0))
        await asyncio.sleep(1.0)


def _healthy(admin: int) -> bool:
    with urllib.request.urlopen(f"http://127.0.0.1:{admin}/healthz", timeout=10) as answer:
        return bool(answer.status == 200)


async def _wait_until_up(admin: int) -> None:
    for _ in range(300):
        try:
            if await asyncio.to_thread(_healthy, admin):
                return
        except OSError:
            await asyncio.sleep(0.1)
    raise SystemExit("the router did not come up")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
