"""What host memory holds and what became of it, beside what vLLM tells of that tier (vLLM 0.32): it knows no fill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingManager,
    OffloadingMetricMetadata,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

METRICS: Final = {
    "prefixpool:host_used_bytes": OffloadingGaugeMetadata("Bytes of host memory that hold chunks."),
    "prefixpool:host_capacity_bytes": OffloadingGaugeMetadata("Bytes of host memory for chunks."),
    "prefixpool:host_events": OffloadingCounterMetadata(
        "What happened to chunks in host memory: read, written, evicted by reason, failures by reason, and reservations.",
        ("event",),
    ),
}


class Counted:
    """For an `OffloadingSpec`: its manager's statistics say more. The rest is as it was."""

    kv_bytes_per_chunk: int
    _counted = False

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Beside vLLM's own."""
        return {**super().build_metric_definitions(extra_config), **METRICS}  # type: ignore[misc]

    def get_manager(self) -> OffloadingManager:
        """One per engine."""
        manager = super().get_manager()  # type: ignore[misc]
        if not self._counted:
            self._counted = True
            stats = HostStats(manager, getattr(manager, "primary_tier", manager), self.kv_bytes_per_chunk)
            manager.get_stats = stats.take
        return manager


class HostStats:
    """Asks a manager for its statistics, and adds those of host memory."""

    def __init__(self, manager: OffloadingManager, host: CPUOffloadingManager, chunk_bytes: int) -> None:
        self._others = manager.get_stats
        self._host = host
        self._chunk_bytes = chunk_bytes
        self._told: Counter[str] = Counter()

    def take(self) -> OffloadingConnectorStats:
        """Since the last call."""
        stats: OffloadingConnectorStats = self._others() or OffloadingConnectorStats()
        host = self._host
        used = host._num_chunks - host._get_num_free_chunks()
        stats.set_gauge("prefixpool:host_used_bytes", used * self._chunk_bytes)
        stats.set_gauge("prefixpool:host_capacity_bytes", host._num_chunks * self._chunk_bytes)
        counts: Mapping[str, int] = getattr(host._policy, "counts", {})  # only our policy counts
        for event, count in dict(counts).items():
            if (new := count - self._told[event]) > 0:
                stats.increase_counter("prefixpool:host_events", new, (event,))
                self._told[event] = count
        return stats
