"""Metrics of the tiers below the device, by the names that vLLM and our disk tier give them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prefixpool_agent.engines.sim import KV_TOKEN_BYTES
from prefixpool_agent.sim.below import Below

_DISK_LABEL: Final = "1:DiskTier"  # as vLLM numbers and names the tier below host memory


class LoadMetrics:
    """Time of loads. `host_s` from host memory to the device, `disk_s` from disk to host memory."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        def counter(name: str, text: str, **more: str) -> Counter:
            values = {**labels, **more}
            return Counter(f"vllm:{name}", text, tuple(values), registry=registry).labels(**values)

        self.host_s = counter("kv_offload_load_time", "Total load time from offload storage to GPU, in seconds.")
        self.disk_s = counter(
            "kv_offload_tiering_read_time", "Total read time from a secondary tier, in seconds.", tier=_DISK_LABEL
        )


class TierCollector(Collector):
    """What the tiers hold, and what happened to their chunks, when somebody asks. Bytes are those that blocks stand for."""

    def __init__(self, below: Below, labels: Mapping[str, str], block_tokens: int) -> None:
        self._below = below
        self._block_bytes = KV_TOKEN_BYTES * block_tokens
        self._names, self._values = tuple(labels), tuple(labels.values())

    def collect(self) -> Iterator[Metric]:
        """See `prometheus_client.registry.Collector`."""
        host, disk = self._below.host, self._below.disk
        yield from self._tier("host", len(host), host.capacity, host.counts)
        if disk is not None:
            yield from self._tier("disk", disk.used_blocks, disk.capacity, disk.counts)
            yield self._gauge("disk_chunks", "Chunks on disk that this engine knows.", len(disk))

    def _tier(self, tier: str, used: int, capacity: int, counts: Mapping[str, int]) -> Iterator[Metric]:
        yield self._gauge(f"{tier}_used_bytes", f"Bytes of chunks in the {tier} tier.", used * self._block_bytes)
        yield self._gauge(f"{tier}_capacity_bytes", f"Bytes that the {tier} tier may use.", capacity * self._block_bytes)
        events = CounterMetricFamily(
            f"prefixpool:{tier}_events", f"What happened to chunks of the {tier} tier.", labels=(*self._names, "event")
        )
        for event, count in dict(counts).items():
            events.add_metric((*self._values, event), count)
        yield events

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"prefixpool:{name}", text, labels=self._names)
        family.add_metric(self._values, value)
        return family
