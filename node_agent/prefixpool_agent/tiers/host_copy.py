"""Copies KV pages between the engine's cache and a pool in host memory, on the CPU platform (vLLM 0.32).

vLLM's own worker needs CUDA streams. One thread that works in order gives what streams give it: a load sees the bytes of
every store submitted before it. Runs in vLLM's worker process.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

STOP_S: Final = 30.0
_log = logging.getLogger(__name__)


class Job(NamedTuple):
    """One transfer. `chunks`: rows of the pool, group after group, as the blocks are."""

    id: int
    blocks: GPULoadStoreSpec
    chunks: Sequence[int]
    is_store: bool
    done: threading.Event


class HostCopyWorker(OffloadingWorker):  # type: ignore[misc]
    """See `vllm.v1.kv_offload.base.OffloadingWorker`. The pool is private memory, or a region that other tiers read, too."""

    def __init__(
        self, kv: CanonicalKVCaches, blocks_per_chunk: int, chunks: int, region: SharedOffloadRegion | None = None
    ) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._refs = kv.group_data_refs
        self._region = region
        # Strided views (blocks, page bytes), used as they are: pages of a layer need not follow one another.
        self._device = [one.tensor.numpy() for one in kv.tensors]
        self._host = [self._rows(one.page_size_bytes * blocks_per_chunk, chunks).numpy() for one in kv.tensors]
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[TransferResult] = queue.SimpleQueue()
        self._running: dict[int, threading.Event] = {}
        self._thread = threading.Thread(target=self._work, daemon=True, name="prefixpool-host-copy")
        self._thread.start()

    def _rows(self, row_bytes: int, chunks: int) -> torch.Tensor:
        if self._region is not None:
            return self._region.create_next_worker_view(row_bytes)
        return torch.zeros((chunks, row_bytes), dtype=torch.int8)

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """From the engine's cache to the pool."""
        return self._submit(job_id, src_spec, dst_spec.block_ids.tolist(), is_store=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """From the pool to the engine's cache."""
        return self._submit(job_id, dst_spec, src_spec.block_ids.tolist(), is_store=False)

    def get_finished(self) -> list[TransferResult]:
        """Those that ended since the last call."""
        ended: list[TransferResult] = []
        while not self._results.empty():
            ended.append(self._results.get())
            self._running.pop(ended[-1].job_id, None)
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Until these have ended."""
        for job_id in job_ids:
            if (done := self._running.get(job_id)) is not None:
                done.wait()

    def shutdown(self) -> None:
        """Ends what is queued first."""
        self._jobs.put(None)
        self._thread.join(timeout=STOP_S)
        self._device.clear()
        self._host.clear()
        if self._region is not None:
            self._region.cleanup()
            self._region = None

    def _submit(self, job_id: int, blocks: GPULoadStoreSpec, chunks: Sequence[int], *, is_store: bool) -> bool:
        job = Job(job_id, blocks, chunks, is_store, threading.Event())
        self._running[job_id] = job.done
        self._jobs.put(job)
        return True

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            began_s = time.perf_counter()
            copied_bytes, succeeded = 0, True
            try:
                copied_bytes = self._copy(job)
            except Exception:  # noqa: BLE001 - the engine ends on a failed transfer: the log must say why
                _log.exception("copying between device and host failed")
                succeeded = False
            self._results.put(TransferResult(job.id, succeeded, copied_bytes, time.perf_counter() - began_s))
            job.done.set()

    def _copy(self, job: Job) -> int:
        copied_bytes = 0
        for group, block, chunk, part in self._places(job):
            for ref in self._refs[group]:
                device, host, size = self._device[ref.tensor_idx], self._host[ref.tensor_idx], ref.page_size_bytes
                at = part * (host.shape[1] // self._blocks_per_chunk)
                if job.is_store:
                    host[chunk, at : at + size] = device[block, :size]
                else:
                    device[block, :size] = host[chunk, at : at + size]
                copied_bytes += size
        return copied_bytes

    def _places(self, job: Job) -> Iterator[tuple[int, int, int, int]]:
        """(group, block, chunk, which part of the chunk). A group may begin in the middle of its first chunk."""
        per_chunk, block_ids = self._blocks_per_chunk, job.blocks.block_ids
        at = first_chunk = 0
        for group, (blocks, first) in enumerate(zip(job.blocks.group_sizes, job.blocks.block_indices, strict=True)):
            skipped = first % per_chunk
            for i in range(blocks):
                chunk, part = divmod(skipped + i, per_chunk)
                yield group, int(block_ids[at + i]), job.chunks[first_chunk + chunk], part
            at += blocks
            first_chunk += -(-(blocks + skipped) // per_chunk) if blocks else 0
