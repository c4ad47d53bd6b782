"""A host tier that is wrong on purpose, while a file says so. A test that passes with one of these proves nothing."""

from __future__ import annotations

import os
from pathlib import Path

from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec

from prefixpool_agent.tiers.host_copy import HostCopyWorker, Job
from prefixpool_agent.tiers.specs import HostSpec
from prefixpool_testing.spill_engine import ENV_FAULT, Fault


class Faulty(HostCopyWorker):
    """Looks at the file, whose path is in the environment, at each load."""

    def _copy(self, job: Job) -> int:
        return 0 if not job.is_store and fault() is Fault.NOTHING_COPIED else super()._copy(job)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        if fault() is not Fault.ROTATED:
            return super().submit_load(job_id, src_spec, dst_spec)
        rows = src_spec.block_ids.tolist()
        return self._submit(job_id, dst_spec, rows[-1:] + rows[:-1], is_store=False)


def fault() -> Fault:
    return Fault(Path(os.environ[ENV_FAULT]).read_text())


class FaultySpec(HostSpec):
    worker_class = Faulty
