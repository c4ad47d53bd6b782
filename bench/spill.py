"""Time to first token by where the prefix is, and what the tiers cost where nothing is ever found. Real vLLM.

    MODEL=<folder> python bench/spill.py [--repeats 5] [--rounds 6] [--dtype bfloat16]      writes build/bench/spill.json

Nowhere, device, host memory, disk: medians over prompts that are nobody else's, of one engine with one thread binding; the
page cache of the system is warm, as it is for what was written lately. Without hits: four prompts at a time, all new, in
turns through an engine whose tiers store everything, and one without tiers; what waits to be written is waited for between
turns, and not counted. Its disk tier is full, so that each chunk takes the place of another: a virtual machine may need
milliseconds for each MB of memory that it touches for the first time, here the page cache's, which is no work of ours.
Most CPUs compute float32 faster than bfloat16, and then store twice the bytes in less time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
from prefixpool_testing.spill_engine import BLOCK, SpillEngine, spill_engine

LENGTHS = (1025, 4097)
WAYS = ("cold", "device", "host", "disk")
ROUND_PROMPTS = 8
ROUND_LENGTH = 513
REPLY = 16
AT_ONCE = 4
FULL_BYTES = 256 << 20
WARM_UP_ROUNDS = 3  # fill the disk tier, in bfloat16, too


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--repeats", type=int, default=5, help="of each way a prefix comes back; 0: only what the tiers cost without hits"
    )
    parser.add_argument("--out", type=Path, default=Path("build/bench/spill.json"))
    parser.add_argument("--rounds", type=int, default=6, help="of all-new prompts, through either engine")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and KV cache: what the model is, or float32")
    options = parser.parse_args()
    report: dict[str, Any] = {}
    with TemporaryDirectory(prefix="kv") as folder:
        flags = ["--host-kv-bytes", str(1 << 30), "--disk-kv-dir", folder, "--disk-kv-bytes"]
        size = ["--max-model-len", "4352", "--device-blocks", "160", "--dtype", options.dtype]
        model = os.environ["MODEL"]
        if options.repeats:
            with spill_engine(model, *flags, str(8 << 30), *size) as tiers:
                report |= {str(length): measure(tiers, length, options.repeats) for length in LENGTHS}
        with spill_engine(model, *flags, str(FULL_BYTES), *size) as tiers, spill_engine(model, *size) as bare:
            report["without hits"] = without_hits(tiers, bare, options.rounds)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    show(report)


def show(report: dict[str, Any]) -> None:
    for length in (str(length) for length in LENGTHS if str(length) in report):
        cold, device, host, disk = (report[length][way] for way in WAYS)
        print(f"{length} tokens: " + ", ".join(f"{way} {1000 * report[length][way]:.0f} ms" for way in WAYS))
        print(
            f"  host / device hit {host / device:.2f}, disk / device hit {disk / device:.2f}, disk / cold {disk / cold:.3f}"
        )
    rates = report["without hits"]
    print(
        f"without hits: {rates['tiers']:.0f} tokens/s with tiers, {rates['bare']:.0f} without: ratio {rates['ratio']:.3f}"
        f" (turns {', '.join(f'{ratio:.3f}' for ratio in rates['ratios'])})"
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


def without_hits(tiers: SpillEngine, bare: SpillEngine, rounds: int) -> dict[str, Any]:
    """Tokens per second, medians, and the median of the ratios of turns that follow one another."""
    rates: dict[str, list[float]] = {"tiers": [], "bare": []}
    for turn in range(-WARM_UP_ROUNDS, rounds):
        order = ("tiers", "bare") if turn % 2 else ("bare", "tiers")
        for name in order:
            rate = round_of(tiers if name == "tiers" else bare, turn, stores=name == "tiers")
            if turn >= 0:
                rates[name].append(rate)
    ratios = [mine / other for mine, other in zip(rates["tiers"], rates["bare"], strict=True)]
    return {**{name: statistics.median(found) for name, found in rates.items()},
            "ratio": statistics.median(ratios), "ratios": ratios}  # fmt: skip


def round_of(engine: SpillEngine, turn: int, *, stores: bool) -> float:
    """Tokens per second."""
    prompts = [engine.prompt(f"new {turn} {i}", ROUND_LENGTH) for i in range(ROUND_PROMPTS)]
    written = engine.disk_events("written") if stores else 0
    began = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = sum(said.cached for said in pool.map(lambda prompt: engine.say(prompt, tokens=REPLY), prompts))
    seconds = time.perf_counter() - began
    assert found == 0, found
    if stores:
        engine.written(written + ROUND_PROMPTS * (ROUND_LENGTH // BLOCK), within_s=120)
    return ROUND_PROMPTS * (ROUND_LENGTH + REPLY) / seconds


if __name__ == "__main__":
    main()
