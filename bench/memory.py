"""How much memory does one boundary take? Fills an index and compares the process before and after.

Writes build/bench/memory.json: figures for 64 replicas, and for all fleets in `by_replicas`.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from prefixpool.index import PrefixIndex
from prefixpool.wire import Tier

BOUNDARIES = 1_000_000
FLEETS = (8, 64, 256)
BATCH = 2000


def main() -> None:
    if len(sys.argv) == 2:
        print(json.dumps(fill(int(sys.argv[1]))))
        return
    rows: dict[int, dict[str, Any]] = {}
    for replicas in FLEETS:  # each in a process of its own, so that no freed memory is reused
        done = subprocess.run([sys.executable, __file__, str(replicas)], check=True, capture_output=True, text=True)
        rows[replicas] = json.loads(done.stdout)
        print(f"{replicas:>4} replicas: {rows[replicas]}")
    out = Path("build/bench/memory.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    keys = ("bytes_per_boundary", "boundaries", "rss_bytes")
    out.write_text(json.dumps({key: rows[64][key] for key in keys} | {"by_replicas": rows}, indent=1) + "\n")


def fill(replicas: int) -> dict[str, Any]:
    """Each boundary is held by one replica, every tenth by another one, too."""
    draw = random.Random(replicas)
    index = PrefixIndex(2 * BOUNDARIES)
    columns = [index.open_column() for _ in range(replicas)]
    before = rss_bytes()
    depths = range(16, 16 * (BATCH + 1), 16)
    while len(index) < BOUNDARIES:
        hashes = [draw.getrandbits(64) for _ in range(BATCH)]
        index.add(draw.choice(columns), hashes, depths, Tier.DEVICE)
        index.add(draw.choice(columns), hashes[::10], depths[::10], Tier.DEVICE)
    after = rss_bytes()
    return {
        "bytes_per_boundary": round((after - before) / len(index), 1),
        "estimated_bytes_per_boundary": round(index.approximate_bytes / len(index), 1),
        "boundaries": len(index),
        "rss_bytes": after,
    }


def rss_bytes() -> int:
    """Resident memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmRSS in /proc/self/status")


if __name__ == "__main__":
    main()
