"""How many chunks of one size before the size doubles? The measurement behind `CHUNKS_PER_STAGE`.

Two prompts share their first bytes and then differ inside a message, at a random place: what a router predicts is the
deepest boundary in front of that place. For each stage length: the error in tokens, the share within one block of 32
tokens, the number of boundaries (index entries and lookups) and the time to hash them.
Text: Python's own standard library, joined. Writes build/bench/stage_length.json.
"""

from __future__ import annotations

import json
import random
import statistics
import sysconfig
import timeit
from bisect import bisect_right
from pathlib import Path

import mmh3

from prefixpool.chain.boundary import CHUNKS_PER_STAGE, chunk_offsets

BYTES_PER_TOKEN = 4
BLOCK_TOKENS = 32
STAGES = (16, 32, 64, 128, 256)
SIZES = (4 << 10, 32 << 10, 128 << 10, 512 << 10)


def main() -> None:
    text = _text(max(SIZES))
    rows = [_row(per_stage, size, text[:size]) for size in SIZES for per_stage in STAGES]
    print(f"{'bytes':>8} {'stage':>6} {'boundaries':>11} {'hash µs':>8} {'error p50/p95 tokens':>21} {'within 1 block':>15}")
    for row in rows:
        mark = " <- chosen" if row["per_stage"] == CHUNKS_PER_STAGE else ""
        errors = f"{row['error_tokens_p50']}/{row['error_tokens_p95']}"
        share = f"{row['within_one_block']:.3f}"
        left = f"{row['bytes']:>8} {row['per_stage']:>6} {row['boundaries']:>11} {row['hash_us']:>8}"
        print(f"{left} {errors:>21} {share:>15}{mark}")
    out = Path("build/bench/stage_length.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(rows, indent=1) + "\n")


def _text(size: int) -> bytes:
    text = b""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= size:
            break
    return text


def _row(per_stage: int, size: int, text: bytes) -> dict[str, float]:
    offsets = chunk_offsets(size, per_stage)
    draw = random.Random(per_stage * size)
    cuts = [draw.randrange(size) for _ in range(4000)]
    errors = [(cut - _deepest(offsets, cut)) // BYTES_PER_TOKEN for cut in cuts]
    return {
        "bytes": size,
        "per_stage": per_stage,
        "boundaries": len(offsets),
        "hash_us": round(min(timeit.repeat(lambda: _hash(text, offsets), number=20, repeat=5)) / 20 * 1e6),
        "error_tokens_p50": int(statistics.median(errors)),
        "error_tokens_p95": int(statistics.quantiles(errors, n=20)[-1]),
        "within_one_block": sum(error <= BLOCK_TOKENS for error in errors) / len(errors),
    }


def _deepest(offsets: list[int], cut: int) -> int:
    at = bisect_right(offsets, cut)
    return offsets[at - 1] if at else 0


def _hash(text: bytes, offsets: list[int]) -> None:
    hasher, view, last = mmh3.mmh3_x64_128(b"seed"), memoryview(text), 0
    for offset in offsets:
        hasher.update(view[last:offset])
        hasher.utupledigest()
        last = offset


if __name__ == "__main__":
    main()
