"""What the host tier keeps: hit rate of our order against LRU and ARC on recorded traffic, and what an operation takes.

    .venv/bin/python bench/policy.py [../shared/traces]

Each trace is replayed through one pool. A request hits as far as its prefix is resident; then all of it is. Mooncake: blocks
of 512 tokens as recorded; the constants of `worth` and `reuse` were chosen on its first half, so the second half is shown by
itself, from an empty pool. Agents: text in pieces of 2,048 characters. Reservations: one conversation in ten promises its
prefix for ten minutes, up to a quarter of the pool. Figures, never pass or fail.
"""

from __future__ import annotations

import gc
import gzip
import json
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import NamedTuple, Protocol

from prefixpool_agent.tiers.worth import Ranking, recompute

RESERVED_S = 600.0
RESERVED_SHARE = 0.25


class Asked(NamedTuple):
    """One request."""

    at_s: float
    keys: list[bytes]
    tokens: int  # of a block
    gold: bool  # one conversation in ten


class Pool(Protocol):
    """What keeps blocks."""

    def access(self, asked: Asked) -> int:
        """Blocks of its prefix that were there; afterwards all are, as far as they fit."""


class Worth:
    """Ours."""

    def __init__(self, capacity: int, reserves: bool = False) -> None:
        self.ranking = Ranking(2 * capacity, recompute)
        self.capacity = capacity
        self.reserves = reserves
        self.reserved: OrderedDict[bytes, float] = OrderedDict()

    def access(self, asked: Asked) -> int:
        found = prefix(asked.keys, self.ranking)
        for key in reversed(asked.keys[:found]):
            self.ranking.use(key, asked.at_s)
        protected = set(asked.keys)
        for i in range(found, len(asked.keys)):
            if asked.keys[i] in self.ranking:
                continue
            if len(self.ranking) >= self.capacity and self.ranking.pop(1, asked.at_s, protected) is None:
                break
            parent = asked.keys[i - 1] if i else b""
            self.ranking.add(asked.keys[i], parent, (i + 1) * asked.tokens, asked.at_s)
        if self.reserves and asked.gold:
            self.reserve(asked)
        return found

    def reserve(self, asked: Asked) -> None:
        while self.reserved and next(iter(self.reserved.values())) <= asked.at_s:
            self.reserved.popitem(last=False)
        for key in asked.keys:
            if key in self.ranking and len(self.reserved) < RESERVED_SHARE * self.capacity:
                self.ranking.reserve(key, asked.at_s + RESERVED_S)
                self.reserved.pop(key, None)
                self.reserved[key] = asked.at_s + RESERVED_S


class Lru:
    """Leaves first: a request's last block is its oldest."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: OrderedDict[bytes, None] = OrderedDict()

    def access(self, asked: Asked) -> int:
        found = prefix(asked.keys, self.blocks)
        for key in reversed(asked.keys):
            self.blocks[key] = None
            self.blocks.move_to_end(key)
        while len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)
        return found


class Arc:
    """Megiddo and Modha, FAST 2003."""

    def __init__(self, capacity: int) -> None:
        self.c = capacity
        self.p = 0.0
        self.t1, self.t2, self.b1, self.b2 = (OrderedDict[bytes, None]() for _ in range(4))

    def __contains__(self, key: object) -> bool:
        return key in self.t1 or key in self.t2

    def access(self, asked: Asked) -> int:
        found = prefix(asked.keys, self)
        for key in reversed(asked.keys):
            self.touch(key)
        return found

    def touch(self, key: bytes) -> None:
        if key in self:
            self.t1.pop(key, None)
            self.t2.pop(key, None)
            self.t2[key] = None
        elif key in self.b1 or key in self.b2:
            recent = key in self.b1
            step = len(self.b2) / len(self.b1) if recent else len(self.b1) / len(self.b2)
            self.p = min(self.c, self.p + max(step, 1)) if recent else max(0.0, self.p - max(step, 1))
            self.replace(not recent)
            (self.b1 if recent else self.b2).pop(key)
            self.t2[key] = None
        else:
            self.miss(key)

    def miss(self, key: bytes) -> None:
        if len(self.t1) + len(self.b1) >= self.c:
            if len(self.t1) < self.c:
                self.b1.popitem(last=False)
                self.replace(False)
            else:
                self.t1.popitem(last=False)
        elif (total := len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2)) >= self.c:
            if total >= 2 * self.c:
                self.b2.popitem(last=False)
            self.replace(False)
        self.t1[key] = None

    def replace(self, in_b2: bool) -> None:
        if len(self.t1) + len(self.t2) < self.c:
            return
        if self.t1 and (len(self.t1) > self.p or (in_b2 and len(self.t1) == self.p)):
            self.b1[self.t1.popitem(last=False)[0]] = None
        elif self.t2:
            self.b2[self.t2.popitem(last=False)[0]] = None


def prefix(keys: Sequence[bytes], held: object) -> int:
    for i, key in enumerate(keys):
        if key not in held:  # type: ignore[operator]
            return i
    return len(keys)


def lines(path: Path) -> list[bytes]:
    with gzip.open(path) as file:
        return file.readlines()


def mooncake(path: Path) -> Iterator[Asked]:
    """Times are recorded in steps of 3 s; requests of one step are spread over it."""
    draw = Random(1)
    rows = [json.loads(line) for line in lines(path)]
    for at_s, row in sorted(((row["timestamp"] / 1000 + 3 * draw.random(), row) for row in rows), key=lambda pair: pair[0]):
        blocks = row["hash_ids"][: row["input_length"] // 512]
        gold = len(blocks) > 1 and blocks[1] % 10 == 0
        yield Asked(at_s, [block.to_bytes(8, "big") for block in blocks], 512, gold)


def agents(path: Path) -> Iterator[Asked]:
    rows = sorted((json.loads(line) for line in lines(path)), key=lambda row: row["timestamp"])
    for row in rows:
        text, keys, before = row["input"], [], b""
        for i in range(0, len(text) - 2047, 2048):
            before = blake2b(before + text[i : i + 2048].encode(), digest_size=16).digest()
            keys.append(before)
        gold = int.from_bytes(blake2b(str(row["session_id"]).encode(), digest_size=4).digest()) % 10 == 0
        yield Asked(row["timestamp"] / 1e6, keys, 512, gold)


class Rate(NamedTuple):
    """Of blocks found: all, those with promises; and of the time to compute all, what was saved."""

    all: float
    gold: float
    saved: float


def replay(requests: Sequence[Asked], pool: Pool) -> Rate:
    hits, blocks, gold_hits, gold_blocks, saved, all_s = 0, 0, 0, 0, 0.0, 0.0
    for asked in requests:
        found = pool.access(asked)
        hits, blocks = hits + found, blocks + len(asked.keys)
        times = [recompute(i * asked.tokens) for i in range(len(asked.keys))]
        saved, all_s = saved + sum(times[:found]), all_s + sum(times)
        if asked.gold:
            gold_hits, gold_blocks = gold_hits + found, gold_blocks + len(asked.keys)
    return Rate(hits / blocks, gold_hits / max(gold_blocks, 1), saved / all_s)


def operations(chunks: int) -> tuple[float, float, float]:
    """Microseconds of CPU time of a use, of a store with an eviction, and heap entries for each chunk, in a full pool."""
    ranking = Ranking(2 * chunks, recompute)
    draw = Random(1)

    def key(i: int) -> bytes:
        return i.to_bytes(8, "big")

    for i in range(chunks):
        ranking.add(key(i), key(i - 1) if i % 64 else b"", i % 64 * 32, i / 1000)
    rounds = min(chunks, 100_000)
    began = time.thread_time()
    for n in range(rounds):
        ranking.use(key(draw.randrange(chunks)), chunks / 1000 + n / 1000)
    used = time.thread_time()
    for n in range(rounds):
        i = chunks + n
        ranking.pop(1, i / 500)
        ranking.add(key(i), key(i - 1) if i % 64 else b"", i % 64 * 32, i / 500)
    ended = time.thread_time()
    return 1e6 * (used - began) / rounds, 1e6 * (ended - used) / rounds, ranking.entries / chunks


def compare(name: str, requests: Sequence[Asked], capacities: Sequence[int]) -> None:
    """Prints a line for each capacity."""
    everything = replay(requests, Lru(1 << 60))
    print(f"\n{name}: {len(requests)} requests; found / compute time saved")
    print(f"with room for all {everything.all:.3f}/{everything.saved:.3f}")
    print(f"{'blocks':>8} {'lru':>13} {'arc':>13} {'worth':>13} {'reserved':>13}   promised: without, with reservations")
    for capacity in capacities:
        lru, arc, worth = (replay(requests, pool(capacity)) for pool in (Lru, Arc, Worth))
        kept = replay(requests, Worth(capacity, reserves=True))
        rates = " ".join(f"{rate.all:>7.3f}/{rate.saved:.3f}" for rate in (lru, arc, worth, kept))
        print(f"{capacity:>8} {rates}   {worth.gold:.3f} {kept.gold:.3f}", flush=True)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "../shared/traces")
    conversations = list(mooncake(folder / "mooncake_fast25_conversation_trace.jsonl.gz"))
    compare("conversations", conversations, (1000, 4000, 16000, 64000))
    compare("second half of the conversations", conversations[len(conversations) // 2 :], (1000, 4000, 16000, 64000))
    compare("agents", list(agents(folder / "lmcache_agent_miniswe.jsonl.gz")), (15, 25, 50, 100))
    gc.disable()  # an engine freezes what lives long; full collections over a million chunks are ten times the rest
    print()
    for chunks in (10_000, 100_000, 1_000_000):
        use_us, store_us, entries = operations(chunks)
        print(f"{chunks:>9,} chunks: use {use_us:.1f} us, store with eviction {store_us:.1f} us, {entries:.1f} entries each")


if __name__ == "__main__":
    main()
