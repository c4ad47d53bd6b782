"""Where a router's CPU time goes: what any aiohttp proxy costs, what reading the prompt costs, and the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from prefixpool.chain import prefix_chain
from prefixpool.chain.canonical import canonical
from prefixpool_router.request import parse_object

_PASSES: Final = 5


def cpu_shares(rows: Sequence[Mapping[str, Any]], body_bytes: int, bodies: Sequence[bytes]) -> str:
    """A line about buffered requests of one size, microseconds of CPU each; `rows` as in build/bench/router.json."""
    cpu_us = {
        (row["target"], row["policy"]): row["cpu_us"]
        for row in rows
        if row["mode"] == "buffered" and row["body_bytes"] == body_bytes and row["workers"] == 1
    }
    peers = [us for (_, policy), us in cpu_us.items() if policy == "cache_aware"]
    bare, own = cpu_us.get(("bare aiohttp", "round_robin")), cpu_us.get(("prefixpool", "prefix"))
    if bare is None or own is None or not peers:
        return f"{body_bytes} bytes: not all targets were measured"
    parsed = [parse_object(body) for body in bodies]
    parse_us, chain_us = _best_us(parse_object, bodies), _best_us(_chain, parsed)
    return (
        f"{body_bytes} bytes: best cache-aware peer {min(peers):.0f} us; bare aiohttp {bare:.0f}; ours {own:.0f}, with "
        f"parsing {parse_us:.0f}, prefix chain {chain_us:.0f}, choice and all else {own - bare - parse_us - chain_us:.0f}"
    )


def _chain(body: dict[str, Any]) -> object:
    found = canonical("/v1/chat/completions", body)
    return found and prefix_chain(found)


def _best_us(call: Callable[[Any], object], inputs: Sequence[Any]) -> float:
    """Mean over the inputs in the best of some passes, as the CPU figures of the table are: neighbours only add."""
    passes_ns = []
    for _ in range(_PASSES):
        start_ns = time.thread_time_ns()
        for each in inputs:
            call(each)
        passes_ns.append(time.thread_time_ns() - start_ns)
    return min(passes_ns) / 1000 / len(inputs)
