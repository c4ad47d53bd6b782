"""What the gate costs a request: a cached prompt of about 1,000 tokens, with and without it, in pairs on one real vLLM.

    MODEL=<folder> python bench/gate.py [--repeats 50]      writes build/bench/gate.json

Each pair is measured back to back in random order; the figure is the median of the differences within pairs, with a 95 %
interval by bootstrap. `null` is the control: both sides of a pair without the gate.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gate_cpu import cpu_costs
from prefixpool_agent.supervisor.plan import Plan

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
from prefixpool_testing.engine_worker import KEY, OPTIONS, EngineWorker

WARM_UP = 10
BOOTSTRAP = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("build/bench/gate.json"))
    options = parser.parse_args()
    with TemporaryDirectory(prefix="pp") as folder:
        worker = EngineWorker(Path(folder), os.environ["MODEL"], *OPTIONS)
        worker.start(switched)
        try:
            report = measure(worker, options.repeats)
        finally:
            left = worker.stop()
    assert left == [], left
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


def switched(plan: Plan) -> Plan:
    argv = list(plan.engine.argv)
    argv[argv.index("--middleware") + 1] = "gate_switch.Switch"
    env = {**plan.engine.env, "PYTHONPATH": str(Path(__file__).parent)}
    return replace(plan, engine=replace(plan.engine, argv=tuple(argv), env=env))


def measure(worker: EngineWorker, repeats: int) -> dict[str, Any]:
    client = Client(worker)
    draw = random.Random(7)
    for _ in range(WARM_UP):
        client.ask_s(gated=True)
        client.ask_s(gated=False)
    pairs: dict[str, list[tuple[float, float]]] = {"gate": [], "null": []}
    for _ in range(repeats):
        for arm in draw.sample(sorted(pairs), 2):
            first_bare = draw.random() < 0.5
            times = {bare: client.ask_s(gated=arm == "gate" and not bare) for bare in (first_bare, not first_bare)}
            pairs[arm].append((times[True], times[False]))
    usage = client.usage
    return {
        "repeats": repeats,
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "body_bytes": len(client.body),
        "load_average": os.getloadavg()[0],  # latencies mean little on a busy machine; `cpu` does
        "cpu": cpu_costs({"body_1k_tokens": client.body, "body_128_kib": padded(client.body, 128 << 10)}),
        **{arm: summary(measured, draw) for arm, measured in pairs.items()},
    }


def padded(body: bytes, size: int) -> bytes:
    """The same request with a prompt of `size` bytes."""
    request = json.loads(body)
    request["messages"][0]["content"] = "word " * (size // 5)
    return json.dumps(request).encode()


def summary(pairs: list[tuple[float, float]], draw: random.Random) -> dict[str, float]:
    differences = [other - bare for bare, other in pairs]
    medians = sorted(statistics.median(draw.choices(differences, k=len(differences))) for _ in range(BOOTSTRAP))
    return {
        "without_p50_ms": milliseconds(statistics.median(bare for bare, _ in pairs)),
        "with_p50_ms": milliseconds(statistics.median(other for _, other in pairs)),
        "difference_p50_ms": milliseconds(statistics.median(differences)),
        "difference_low_ms": milliseconds(medians[int(0.025 * BOOTSTRAP)]),
        "difference_high_ms": milliseconds(medians[int(0.975 * BOOTSTRAP)]),
    }


def milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 3)


class Client:
    """One kept-alive connection for both arms."""

    def __init__(self, worker: EngineWorker) -> None:
        model = worker.get("/v1/models").json()["data"][0]["id"]
        text = " ".join(f"Line {n} of a long document." for n in range(112))
        messages = [{"role": "user", "content": text}]
        self.body = json.dumps({"model": model, "messages": messages, "max_tokens": 1, "temperature": 0}).encode()
        self.usage: dict[str, Any] = {}
        self._connection = http.client.HTTPConnection("127.0.0.1", worker.port, timeout=60)

    def ask_s(self, *, gated: bool) -> float:
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        if not gated:
            headers["x-bench-bare"] = "1"
        began = time.perf_counter()
        self._connection.request("POST", "/v1/chat/completions", self.body, headers)
        answer = self._connection.getresponse()
        data = answer.read()
        took = time.perf_counter() - began
        assert answer.status == 200, data
        self.usage = json.loads(data)["usage"]
        return took


if __name__ == "__main__":
    main()
