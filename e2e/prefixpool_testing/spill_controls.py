"""Tiers that are wrong on purpose. A test that passes with one of these proves nothing."""

from __future__ import annotations

from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec

from prefixpool_agent.tiers.host_copy import HostCopyWorker, Job
from prefixpool_agent.tiers.specs import HostSpec


class NothingCopied(HostCopyWorker):
    """Loads restore nothing."""

    def _copy(self, job: Job) -> int:
        return super()._copy(job) if job.is_store else 0


class Rotated(HostCopyWorker):
    """Loads restore each chunk to its neighbour's place."""

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        rows = src_spec.block_ids.tolist()
        return self._submit(job_id, dst_spec, rows[-1:] + rows[:-1], is_store=False)


class NothingCopiedSpec(HostSpec):
    worker_class = NothingCopied


class RotatedSpec(HostSpec):
    worker_class = Rotated
