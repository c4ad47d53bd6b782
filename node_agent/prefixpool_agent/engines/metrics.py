"""What the agent reads from an engine's `/metrics` text: load, and the KV cache that was really allocated. Pure.

Only the lines that are needed are looked at, found by searching: a busy vLLM exposes 100 KB and is read every second.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

_LABEL: Final = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')

_BY_SOURCE: Final = "vllm:prompt_tokens_cached_by_source_total"
_HOST_FAILURES: Final = {
    "vllm:kv_offload_allocation_failure_total": "write_full",  # no room, and nothing that may go
    "vllm:kv_offload_tiering_promotion_allocation_failures_total": "promotion_full",  # the same, for what is on disk
}
_DISK_FAILURES: Final = {
    "vllm:kv_offload_tiering_promotion_job_failures_total": "promotion_failed",
    "vllm:kv_offload_tiering_cascade_job_failures_total": "cascade_failed",
}


class CacheConfig(NamedTuple):
    """`vllm:cache_config_info`. `blocks` includes the null block, which holds nothing."""

    block_tokens: int
    blocks: int

    @property
    def usable_blocks(self) -> int:
        return max(0, self.blocks - 1)


class TierFigures(NamedTuple):
    """Of one tier below the device. `events`: how often what happened to its chunks, by the names that the tier gives."""

    used_bytes: int = 0
    capacity_bytes: int = 0
    events: tuple[tuple[str, int], ...] = ()


class EngineLoad(NamedTuple):
    """One reading. Counters only grow while the engine lives."""

    running: int = 0  # requests that decode or prefill
    waiting: int = 0  # requests queued inside the engine
    kv_usage: float = 0.0  # fraction of device blocks in use by running requests
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    host_tokens: int = 0  # prompt tokens brought back from host memory
    disk_tokens: int = 0  # and from disk, which goes through host memory
    load_s: float = 0.0  # of copies from host memory to the device
    read_s: float = 0.0  # of reads from disk to host memory
    host: TierFigures = TierFigures()
    disk: TierFigures = TierFigures()
    cache: CacheConfig | None = None  # None: the engine does not say (yet)

    def load_s_per_token(self) -> tuple[float, float]:
        """From host memory, from disk; 0: never done."""
        loaded = self.host_tokens + self.disk_tokens
        host_s = self.load_s / loaded if loaded else 0.0
        return host_s, self.read_s / self.disk_tokens + host_s if self.disk_tokens else 0.0


def parse_load(text: str) -> EngineLoad:
    """Never raises: a metric that is missing or unreadable counts as 0."""
    return EngineLoad(
        running=int(sum(_values(text, "vllm:num_requests_running"))),
        waiting=int(sum(_values(text, "vllm:num_requests_waiting"))),
        kv_usage=max(_values(text, "vllm:kv_cache_usage_perc"), default=0.0),
        preemptions=int(sum(_values(text, "vllm:num_preemptions_total"))),
        prompt_tokens=int(sum(_values(text, "vllm:prompt_tokens_total"))),
        cached_tokens=int(sum(_values(text, "vllm:prompt_tokens_cached_total"))),
        host_tokens=int(sum(_values(text, _BY_SOURCE, 'source="host"'))),
        disk_tokens=int(sum(_values(text, _BY_SOURCE, 'source="disk"'))),
        load_s=sum(_values(text, "vllm:kv_offload_load_time_total")),
        read_s=sum(_values(text, "vllm:kv_offload_tiering_read_time_total")),
        host=_tier(text, "host", _HOST_FAILURES),
        disk=_tier(text, "disk", _DISK_FAILURES),
        cache=_cache_config(text),
    )


def _tier(text: str, tier: str, failures: Mapping[str, str]) -> TierFigures:
    """Ours, and the failures that only vLLM's tiering sees, under names like ours."""
    events: Counter[str] = Counter()
    for line in _lines(text, f"prefixpool:{tier}_events_total"):
        if (event := dict(_LABEL.findall(line)).get("event")) is not None:
            events[event] += int(_value(line))
    for metric, event in failures.items():
        events[event] += int(sum(_values(text, metric)))
    return TierFigures(
        used_bytes=int(sum(_values(text, f"prefixpool:{tier}_used_bytes"))),
        capacity_bytes=int(sum(_values(text, f"prefixpool:{tier}_capacity_bytes"))),
        events=tuple(sorted((event, count) for event, count in events.items() if count)),
    )


def _cache_config(text: str) -> CacheConfig | None:
    for line in _lines(text, "vllm:cache_config_info"):
        labels = dict(_LABEL.findall(line))
        tokens, blocks = labels.get("block_size", ""), labels.get("num_gpu_blocks", "")
        if tokens.isdecimal() and blocks.isdecimal():
            return CacheConfig(block_tokens=int(tokens), blocks=int(blocks))
    return None


def _values(text: str, metric: str, label: str = "") -> Iterator[float]:
    for line in _lines(text, metric):
        if label in line:
            yield _value(line)


def _value(line: str) -> float:
    """0 for nonsense."""
    try:
        value = float(line.rpartition(" ")[2])
    except ValueError:
        return 0.0
    return value if value == value and abs(value) != float("inf") else 0.0


def _lines(text: str, metric: str) -> Iterator[str]:
    """Samples of one metric, which follow each other."""
    at = 0 if text.startswith((metric + "{", metric + " ")) else _next(text, metric, 0)
    while at >= 0:
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        yield text[at:end]
        at = _next(text, metric, end)


def _next(text: str, metric: str, start: int) -> int:
    """Where the next sample begins, -1: nowhere."""
    found = [at + 1 for at in (text.find(f"\n{metric}{sign}", start) for sign in "{ ") if at >= 0]
    return min(found, default=-1)
