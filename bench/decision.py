"""How long does a decision take, with a million boundaries in the index? Writes build/bench/decision.json.

`total`: a parsed body -> canonical -> prefix chain -> match -> choice; `match_choose`: the last two alone. One load update
precedes each decision, as in a running router. Cases: warm (one replica holds all but the last turn, others less), cold
(nobody holds anything), shared_head (everybody holds the first fifth), tiers (as warm, a third each on the device, in host
memory and on disk), store (as warm, and all of it on a disk that everybody has). `p50_us` and `p99_us` are wall time;
`p99_cpu_us` is the thread's own CPU time, which a busy machine does not stretch.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefixpool.chain import PrefixChain, canonical, prefix_chain
from prefixpool.index import PrefixIndex
from prefixpool.policy import Candidate, Candidates, Query
from prefixpool.policy.prefix import Prefix
from prefixpool.wire import Tier

BOUNDARIES = 1_000_000
FLEETS = (8, 64, 256)
SHAPES = ((4 << 10, 8), (32 << 10, 40), (128 << 10, 8), (128 << 10, 40), (128 << 10, 200))  # bytes, messages
CASES = ("warm", "cold", "shared_head", "tiers", "store")
BODIES = 60  # different prompts of each shape and case
PASSES = 5
BLOCK_TOKENS = 16
BYTES_PER_TOKEN = 4
PATH = "/v1/chat/completions"
WORDS = ("the", "router", "holds", "prefix", "für", "of", "a", "conversation", "tokens", "cache", "über", "and", "lookup")


@dataclass(frozen=True)
class Fleet:
    """What a router keeps, and the bench's dice."""

    index: PrefixIndex
    candidates: Candidates
    draw: random.Random


def main() -> None:
    rows = [row for replicas in FLEETS for row in measure(replicas)]
    columns = {
        "replicas": 8,
        "body_bytes": 10,
        "messages": 8,
        "boundaries": 10,
        "case": 12,
        "stage": 13,
        "p50_us": 8,
        "p99_us": 8,
        "p99_cpu_us": 10,
    }
    print(" ".join(f"{name:>{width}}" for name, width in columns.items()))
    for row in rows:
        print(" ".join(f"{row[name]:>{width}}" for name, width in columns.items()))
    out = Path("build/bench/decision.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(rows, indent=1) + "\n")


def measure(replicas: int) -> list[dict[str, Any]]:
    fleet = filled(replicas)
    rows = []
    for body_bytes, messages in SHAPES:
        for case in CASES:
            bodies = [body(fleet.draw, body_bytes, messages) for _ in range(BODIES)]
            chains = [chain(each) for each in bodies]
            for each in chains:
                settle(fleet, each, case)
            stages: dict[str, tuple[Callable[[Any], object], list[Any]]] = {
                "total": (lambda each: decide(fleet, chain(each)), bodies),
                "match_choose": (lambda each: decide(fleet, each), chains),
            }
            for stage, (call, inputs) in stages.items():
                rows.append(
                    {
                        "replicas": replicas,
                        "body_bytes": body_bytes,
                        "messages": messages,
                        "boundaries": len(chains[0].hashes),
                        "case": case,
                        "stage": stage,
                        **times_us(fleet, call, inputs),
                    }
                )
    return rows


def filled(replicas: int) -> Fleet:
    """An index of a million boundaries, mostly held by one replica, some by several."""
    draw = random.Random(replicas)
    index = PrefixIndex(2 * BOUNDARIES)
    columns = [index.open_column() for _ in range(replicas)]
    while len(index) < BOUNDARIES:
        hashes = [draw.getrandbits(64) for _ in range(200)]
        depths = range(16, 16 * 201, 16)
        for column in draw.sample(columns, draw.choice((1, 1, 1, 2, 3))):
            index.add(column, hashes, depths, Tier.DEVICE)
    candidates = Candidates(
        [Candidate(f"pool-{i}", bit=1 << 3 * columns[i], device_tokens=400_000) for i in range(replicas)]
    )
    for member in list(candidates):
        candidates.update(member.name, inflight=draw.randrange(8), pending_tokens=draw.randrange(4000), resident=1)
    return Fleet(index, candidates, draw)


def body(draw: random.Random, body_bytes: int, messages: int) -> dict[str, Any]:
    """As parsed from JSON: one system message, then turns, all of one length."""
    size = body_bytes // messages - 32
    turns = []
    for i in range(messages):
        words = []
        length = 0
        while length < size:
            words.append(draw.choice(WORDS) if draw.random() < 0.9 else str(draw.getrandbits(20)))
            length += len(words[-1]) + 1
        role = "system" if i == 0 else ("user", "assistant")[i % 2 == 0]
        turns.append({"role": role, "content": " ".join(words)[:size]})
    parsed: dict[str, Any] = json.loads(json.dumps({"model": "m", "messages": turns, "stream": True}))
    return parsed


def chain(parsed: dict[str, Any]) -> PrefixChain:
    found = canonical(PATH, parsed)
    assert found is not None
    return prefix_chain(found)


def settle(fleet: Fleet, each: PrefixChain, case: str) -> None:
    """Make residency as the case wants it."""
    depths = [offset // BYTES_PER_TOKEN for offset in each.offsets]
    columns = range(len(fleet.candidates))
    for column in columns:
        fleet.index.mount(column, "shared" if case == "store" else "")
    if case in ("warm", "tiers", "store"):
        tiers = (Tier.DEVICE, Tier.HOST, Tier.DISK) if case == "tiers" else (Tier.DEVICE,)
        for part, column in zip((0.9, 0.5, 0.3, 0.1), fleet.draw.sample(columns, 4), strict=True):
            ends = [int(part * len(depths) * (i + 1) / len(tiers)) for i in range(len(tiers))]
            for start, end, tier in zip([0, *ends], ends, tiers, strict=False):
                fleet.index.add(column, each.hashes[start:end], depths[start:end], tier)
        if case == "store":
            fleet.index.add(0, each.hashes, depths, Tier.DISK)
    elif case == "shared_head":
        upto = len(depths) // 5
        for column in columns:
            fleet.index.add(column, each.hashes[:upto], depths[:upto], Tier.DEVICE)


def decide(fleet: Fleet, each: PrefixChain) -> object:
    levels = fleet.index.walk(each.hashes, BLOCK_TOKENS).levels
    tokens = each.total_bytes // BYTES_PER_TOKEN
    cold_tokens = each.offsets[each.cold] // BYTES_PER_TOKEN
    query = Query(levels, tokens, each.hashes[each.cold], 0, fleet.draw.random(), 0, cold_tokens)
    return Prefix().choose(query, fleet.candidates)


def times_us(fleet: Fleet, call: Callable[[Any], object], inputs: list[Any]) -> dict[str, float]:
    names = [member.name for member in fleet.candidates]
    for each in inputs[:10]:
        call(each)
    wall, cpu = list[int](), list[int]()
    for _ in range(PASSES):
        for each in inputs:
            fleet.candidates.update(
                fleet.draw.choice(names), inflight=fleet.draw.randrange(8), pending_tokens=fleet.draw.randrange(4000)
            )
            cpu_start, start = time.thread_time_ns(), time.perf_counter_ns()
            call(each)
            wall.append(time.perf_counter_ns() - start)
            cpu.append(time.thread_time_ns() - cpu_start)
    return {"p50_us": quantile_us(wall, 0.5), "p99_us": quantile_us(wall, 0.99), "p99_cpu_us": quantile_us(cpu, 0.99)}


def quantile_us(times_ns: list[int], quantile: float) -> float:
    return round(sorted(times_ns)[int(quantile * len(times_ns))] / 1e3, 1)


if __name__ == "__main__":
    main()
