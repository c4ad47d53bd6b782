"""Metrics of the tiers below the device, by the names that vLLM and our disk tier give them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prefixpool_agent.sim.disk import DiskTier

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


class DiskCollector(Collector):
    """What the disk tier holds, and what happened to its chunks, when somebody asks."""

    def __init__(self, disk: DiskTier, labels: Mapping[str, str]) -> None:
        self._disk = disk
        self._names, self._values = tuple(labels), tuple(labels.values())

    def collect(self) -> Iterator[Metric]:
        """See `prometheus_client.registry.Collector`."""
        disk = self._disk
        yield self._gauge("disk_used_bytes", "Bytes of all files in the directory of the disk tier.", disk.used_bytes)
        yield self._gauge("disk_capacity_bytes", "Bytes that the disk tier may use.", disk.capacity_bytes)
        yield self._gauge("disk_chunks", "Chunks on disk that this engine knows.", len(disk))
        events = CounterMetricFamily(
            "prefixpool:disk_events", "What happened to chunks of the disk tier.", labels=(*self._names, "event")
        )
        for event, count in dict(disk.counts).items():
            events.add_metric((*self._values, event), count)
        yield events

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"prefixpool:{name}", text, labels=self._names)
        family.add_metric(self._values, value)
        return family
