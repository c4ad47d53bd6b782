"""vLLM's offloading, with figures of host memory (`host_stats`); on the CPU platform with our copying, too (vLLM 0.32).

vLLM imports these by name, from the engine's `--kv-transfer-config` (see `connector`). On CUDA all copies are vLLM's own.
"""

from __future__ import annotations

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from prefixpool_agent.tiers.host_copy import HostCopyWorker
from prefixpool_agent.tiers.host_stats import Counted


class CudaHostSpec(Counted, CPUOffloadingSpec):  # type: ignore[misc]
    """Host memory below the engine's cache, on CUDA."""


class CudaHostDiskSpec(Counted, TieringOffloadingSpec):  # type: ignore[misc]
    """Host memory, and disk below it, on CUDA."""


class HostSpec(Counted, CPUOffloadingSpec):  # type: ignore[misc]
    """Host memory below the engine's cache."""

    worker_class = HostCopyWorker
    _copies: HostCopyWorker | None = None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """One per worker process; its pool is private memory."""
        if self._copies is None:
            self._copies = self.worker_class(kv_caches, self.blocks_per_chunk, self.num_chunks)
        return self._copies


class HostDiskSpec(Counted, TieringOffloadingSpec):  # type: ignore[misc]
    """Host memory, and disk below it. The scheduler's process reads and writes the pool for the disk, so it is shared."""

    worker_class = HostCopyWorker
    _copies: HostCopyWorker | None = None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """One per worker process."""
        if self._copies is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._copies = self.worker_class(kv_caches, self.blocks_per_chunk, self.num_chunks, region)
        return self._copies
