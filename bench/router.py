"""Throughput and latency of the router beside its peers from PyPI, in one run, as ratios.

Beside it the least that an aiohttp proxy can be (`bare_proxy.py`): how much of the time is the libraries'.

Four local backends (one cheap process), `wrk` with 32 connections as the client, chat bodies of 1, 32 and 128 KB in eight
messages (groups share half of their text, as documents do), answers buffered or streamed. Targets are started one after
another and measured in `--rounds` rounds, so that drift of the machine hits all alike; the median round is reported, and of
the CPU time that all processes of a target spend on one request the lowest, because busy neighbours only add to it.
Writes build/bench/router.json. Peers live in environments of their own under the cache folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cpu_shares import cpu_shares

BACKENDS = 4
CONNECTIONS = 32
SIZES = (1 << 10, 32 << 10, 128 << 10)
MODES = ("buffered", "streaming")
PEERS = {
    "vllm-router": "vllm-router==0.1.17",
    "smg": "smg==1.13.0",
    "sglang-router": "sglang-router==0.3.2",
}
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prefixpool"


class Target(NamedTuple):
    """One router command; `{port}`, `{urls}` and `{extra}` (a second free port) are filled in."""

    name: str
    policy: str
    workers: int
    argv: list[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=3, help="of each measurement (default 3)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds over all targets (default 2)")
    parser.add_argument("--only", default="", help="only targets whose name contains this")
    args = parser.parse_args()
    if shutil.which("wrk") is None:
        sys.exit("wrk is missing: apt-get install -y wrk (make bench does it)")
    ports = [_free_port() for _ in range(BACKENDS)]
    found: dict[tuple[str, str, int, int, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder, _process([sys.executable, "bench/http_backend.py", *map(str, ports)]):
        scripts = {(size, mode): _script(Path(folder), size, mode) for size in SIZES for mode in MODES}
        targets = [target for target in _targets() if args.only in target.name]
        for round_ in range(args.rounds):
            for target in targets:
                print(
                    f"round {round_ + 1}/{args.rounds}: {target.name} {target.policy} workers={target.workers}", flush=True
                )
                for key, row in _measure(target, ports, scripts, args.seconds).items():
                    found.setdefault((target.name, target.policy, target.workers, *key), []).append(row)
    rows = [_summary(key, values) for key, values in found.items()]
    out = Path("build/bench/router.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(rows, indent=1) + "\n")
    _print(rows)
    for size in SIZES:
        print(cpu_shares(rows, size, [json.dumps(_body(size, "buffered", number)).encode() for number in range(96)]))


def _targets() -> list[Target]:
    python = Path(sys.executable).parent
    own = [str(python / "prefixpool-router"), "--port", "{port}", "--admin-port", "{extra}", "--log-level", "warning"]
    peers = {name: str(_peer(name, requirement)) for name, requirement in PEERS.items()}
    urls = ["--worker-urls", "{urls}", "--host", "127.0.0.1", "--port", "{port}", "--prometheus-port", "{extra}"]
    return [
        Target("prefixpool", "prefix", 1, [*own, "--policy", "prefix", "{replicas}"]),
        Target("prefixpool", "prefix", 2, [*own, "--policy", "prefix", "--workers", "2", "{replicas}"]),
        Target("bare aiohttp", "round_robin", 1, [sys.executable, "bench/bare_proxy.py", "{port}", "{urls}"]),
        Target("vllm-router", "consistent_hash", 1, [peers["vllm-router"], *urls, "--policy", "consistent_hash"]),
        Target("vllm-router", "cache_aware", 1, [peers["vllm-router"], *urls, "--policy", "cache_aware"]),
        Target("smg", "cache_aware", 1, [peers["smg"], "launch", *urls, "--policy", "cache_aware"]),
        Target("sglang-router", "cache_aware", 1, [peers["sglang-router"], "launch", *urls, "--policy", "cache_aware"]),
        Target("direct", "none", 0, []),
    ]


def _peer(name: str, requirement: str) -> Path:
    folder = _CACHE / "peers" / requirement.replace("==", "-")
    command = folder / "bin" / name
    if not command.exists():
        uv = next(iter(sorted(_CACHE.glob("uv-*/bin/uv"))), None) or shutil.which("uv")
        if uv is None:
            sys.exit("uv is missing: run `make setup` first")
        print(f"installing {requirement} ...", flush=True)
        subprocess.run([str(uv), "venv", "-q", "--clear", "-p", sys.executable, str(folder)], check=True)
        subprocess.run([str(uv), "pip", "install", "-q", "-p", str(folder), requirement], check=True)
    return command


def _measure(
    target: Target, ports: list[int], scripts: dict[tuple[int, str], Path], seconds: int
) -> dict[tuple[int, str], dict[str, float]]:
    port, out = _free_port(), {}
    urls = [f"http://127.0.0.1:{backend}" for backend in ports]
    with contextlib.ExitStack() as stack:
        pid = 0
        if target.argv:
            pid = stack.enter_context(_process(_argv(target.argv, port, urls))).pid
            _wait_until_up(port)
        else:
            port = ports[0]
        for key, script in scripts.items():
            _wrk(port, script, 1)  # warm: connections, trees, caches
            before_s = _cpu_s(pid)
            row = out[key] = _wrk(port, script, seconds)
            row["cpu_us"] = (_cpu_s(pid) - before_s) * 1e6 / row["requests"]
    return out


def _cpu_s(pid: int) -> float:
    """CPU time that a process and its living children have used; 0 for no process."""
    if not pid:
        return 0.0
    total_s = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that ended
            total_s += int((task / "schedstat").read_text().split()[0]) / 1e9
            total_s += sum(_cpu_s(int(child)) for child in (task / "children").read_text().split())
    return total_s


def _argv(argv: list[str], port: int, urls: list[str]) -> list[str]:
    out: list[str] = []
    for part in argv:
        if part == "{urls}":
            out += urls
        elif part == "{replicas}":
            out += [word for i, url in enumerate(urls) for word in ("--replica", f"bench-{i}={url}")]
        else:
            out.append(part.format(port=port, extra=_free_port()))
    return out


def _wrk(port: int, script: Path, seconds: int) -> dict[str, float]:
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    argv = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "--timeout", "10s", "-s", str(script), url]
    text = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=seconds + 60).stdout
    found = re.search(r"RESULT (\d+) (\d+) (\d+) (\d+)", text)
    if found is None:
        sys.exit(f"wrk said nothing usable:\n{text}")
    requests, duration_us, p99_us, errors = map(int, found.groups())
    return {"requests": requests, "requests_per_s": requests / duration_us * 1e6, "p99_ms": p99_us / 1000, "errors": errors}


_LUA = """
local bodies, next_body = {}, 0
for body in io.lines("BODIES") do bodies[#bodies + 1] = body end
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
request = function()
  next_body = next_body % #bodies + 1
  return wrk.format(nil, nil, nil, bodies[next_body])
end
done = function(summary, latency, requests)
  local e = summary.errors
  io.write(string.format("RESULT %d %d %d %d\\n", summary.requests, summary.duration, latency:percentile(99),
    e.connect + e.read + e.write + e.status + e.timeout))
end
"""


def _script(folder: Path, size: int, mode: str) -> Path:
    bodies, script = folder / f"{size}-{mode}.jsonl", folder / f"{size}-{mode}.lua"
    bodies.write_text("".join(json.dumps(_body(size, mode, i)) + "\n" for i in range(96)))
    script.write_text(_LUA.replace("BODIES", str(bodies)))
    return script


def _body(size: int, mode: str, number: int) -> dict[str, object]:
    """Twelve groups of eight; within a group the first half of the text is shared."""
    group, own = random.Random(number % 12), random.Random(1000 + number)
    words = max(1, (size - 500) // 8 // 7)  # eight messages of seven-byte words
    roles = ["user", "assistant"] * 4
    messages = [
        {"role": role, "content": " ".join(f"{(group if i < 4 else own).randrange(10**6):06d}" for _ in range(words))}
        for i, role in enumerate(roles)
    ]
    extra = {"stream": True, "stream_options": {"include_usage": True}} if mode == "streaming" else {}
    return {"model": "bench", "messages": messages, "max_tokens": 8, **extra}


@contextlib.contextmanager
def _process(argv: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield child
    finally:
        os.killpg(child.pid, signal.SIGTERM)
        try:
            child.wait(timeout=3)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait(timeout=10)


def _wait_until_up(port: int) -> None:
    body = json.dumps({"model": "bench", "messages": [{"role": "user", "content": "hi"}]}).encode()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions", data=body, headers={"Content-Type": "application/json"}
        )
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(request, timeout=2) as answer:
            if answer.status == 200:
                return
        time.sleep(0.1)  # noqa: TID251 - a benchmark's own wait, outside any event loop
    sys.exit(f"no router answers on port {port}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _summary(key: tuple[str, str, int, int, str], values: list[dict[str, float]]) -> dict[str, object]:
    name, policy, workers, size, mode = key
    return {
        "target": name,
        "policy": policy,
        "body_bytes": size,
        "mode": mode,
        "workers": workers,
        "requests_per_s": round(statistics.median(row["requests_per_s"] for row in values), 1),
        "p99_ms": round(statistics.median(row["p99_ms"] for row in values), 2),
        "cpu_us": round(min(row["cpu_us"] for row in values), 1),
        "errors": int(sum(row["errors"] for row in values)),
    }


def _print(rows: list[dict[str, object]]) -> None:
    own = {(r["body_bytes"], r["mode"]): r for r in rows if r["target"] == "prefixpool" and r["workers"] == 1}
    head = (
        f"{'target':<15}{'policy':<16}{'w':>2} {'bytes':>7} {'mode':<10}{'req/s':>8}{'p99 ms':>9}{'cpu us':>8}{'errors':>7}"
    )
    print(f"{head}  prefixpool/this")
    for row in rows:
        base = own.get((row["body_bytes"], row["mode"]))
        ratio = f"{float(str(base['requests_per_s'])) / max(0.1, float(str(row['requests_per_s']))):.2f}" if base else "-"
        print(
            f"{row['target']:<15}{row['policy']:<16}{row['workers']:>2} {row['body_bytes']:>7} {row['mode']:<10}"
            f"{row['requests_per_s']:>8}{row['p99_ms']:>9}{row['cpu_us']:>8}{row['errors']:>7}  {ratio}"
        )


if __name__ == "__main__":
    main()
