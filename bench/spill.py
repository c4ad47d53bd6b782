"""Time to first token by where the prefix is: nowhere, device, host memory, disk. One real vLLM, one thread binding.

    MODEL=<folder> python bench/spill.py [--repeats 5]      writes build/bench/spill.json

Medians over prompts that are nobody else's; the page cache of the system is warm, as it is for what was written lately.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
from prefixpool_testing.spill_engine import BLOCK, SpillEngine, spill_engine

LENGTHS = (1025, 4097)
WAYS = ("cold", "device", "host", "disk")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("build/bench/spill.json"))
    options = parser.parse_args()
    with TemporaryDirectory(prefix="kv") as folder:
        flags = ["--host-kv-bytes", str(1 << 30), "--disk-kv-dir", folder, "--disk-kv-bytes", str(8 << 30)]
        size = ["--max-model-len", "4352", "--device-blocks", "160", "--dtype", "bfloat16"]
        with spill_engine(os.environ["MODEL"], *flags, *size) as engine:
            report = {str(length): measure(engine, length, options.repeats) for length in LENGTHS}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    for length, seconds in report.items():
        cold, device, host, disk = (seconds[way] for way in WAYS)
        print(f"{length} tokens: " + ", ".join(f"{way} {1000 * seconds[way]:.0f} ms" for way in WAYS))
        print(
            f"  host / device hit {host / device:.2f}, disk / device hit {disk / device:.2f}, disk / cold {disk / cold:.3f}"
        )


def measure(engine: SpillEngine, length: int, repeats: int) -> dict[str, float]:
    """Seconds of an answer of one token, by where its prefix was."""
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(repeats + 1):
        prompt, written = engine.prompt(f"{length} {turn}", length), engine.disk_events("written")
        found = {}
        for way in WAYS:
            if way == "host":
                engine.reset()
            elif way == "disk":
                engine.written(written + length // BLOCK, within_s=120)
                engine.reset(host=True)
            began = time.perf_counter()
            cached = engine.say(prompt, tokens=1).cached
            found[way] = time.perf_counter() - began
            assert cached == (0 if way == "cold" else length - 1), (way, cached)
        if turn:  # the first one warms up
            for way in WAYS:
                times[way].append(found[way])
    return {way: statistics.median(seconds) for way, seconds in times.items()}


if __name__ == "__main__":
    main()
