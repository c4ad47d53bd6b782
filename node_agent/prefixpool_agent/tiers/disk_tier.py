"""The disk below host memory, as vLLM's scheduler sees it (vLLM 0.32). Nothing here waits for a disk.

Whatever goes wrong below ends in a miss: the engine computes what it does not get. After a failed write the tier takes no
more for a while, so that a broken disk costs nothing; while all readers hang it holds nothing, and while looks for what
other engines wrote hang it holds what this one knows.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from prefixpool import names
from prefixpool_agent.tiers.connector import DiskOptions
from prefixpool_agent.tiers.disk_care import Care
from prefixpool_agent.tiers.disk_store import DiskStore, Limits
from prefixpool_agent.tiers.identity import namespace
from prefixpool_agent.tiers.mover import StoreMover
from prefixpool_agent.tiers.trail import Trail
from prefixpool_agent.tiers.transfers import Ended, Part, Transfers
from prefixpool_agent.tiers.worth import recompute

READERS: Final = 4
WRITERS: Final = 2
WRITE_DEADLINE: Final = 10  # times the deadline of reads: nobody waits for a write, but its rows in host memory are held

METRICS: Final = {
    "prefixpool:disk_used_bytes": OffloadingGaugeMetadata("Bytes of all files in the directory of the disk tier."),
    "prefixpool:disk_capacity_bytes": OffloadingGaugeMetadata("Bytes that the disk tier may use."),
    "prefixpool:disk_chunks": OffloadingGaugeMetadata("Chunks on disk that this engine knows."),
    "prefixpool:disk_events": OffloadingCounterMetadata(
        "What happened to chunks of the disk tier: read, written, evicted by reason, and failures by reason.", ("event",)
    ),
}


class _Asked:
    """What is known of one request's keys."""

    def __init__(self) -> None:
        self.found: dict[OffloadKey, bool | None] = {}  # None: the disk is being asked
        self.failed: set[OffloadKey] = set()  # not to be promised again
        self.since_s = time.monotonic()
        self.trail = Trail()


class DiskTier(SecondaryTierManager):  # type: ignore[misc]
    """See `vllm.v1.kv_offload.tiering.base.SecondaryTierManager`; one per engine, in the scheduler's process."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        *,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        """`options`: see `connector.DiskOptions`."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._options = given = msgspec.convert(options, DiskOptions)
        self._rows = len(primary_kv_view)
        limits = Limits(given.capacity_bytes, given.free_bytes, given.shared)
        self._store = DiskStore(Path(given.directory), _namespace(offloading_spec, given), limits, recompute)
        self._care = Care(self._store, shared=given.shared)
        self._mover = StoreMover(self._store, self._care.soon)
        self._transfers = Transfers(
            self._mover,
            primary_kv_view.cast("B"),
            row_bytes=self.block_size_bytes,
            readers=READERS,
            writers=WRITERS,
            deadline_s=given.deadline_s,
            write_deadline_s=WRITE_DEADLINE * given.deadline_s,
        )
        self._asked: dict[int, tuple[TransferJob, _Asked]] = {}  # by job
        self._refused: list[JobResult] = []
        self._events: list[OffloadingEvent] = []
        self._told: dict[str, int] = {}
        self._questions: queue.SimpleQueue[tuple[OffloadKey, _Asked]] = queue.SimpleQueue()
        self._looking_since_s = float("inf")  # when the present look at the disk began
        if given.shared:
            threading.Thread(target=self._answer, daemon=True, name="prefixpool-disk-look").start()
        self._care.start()
        if run_dir := os.environ.get(names.ENV_RUN_DIR):
            Path(run_dir, names.RUN_DISK_FOLDER).write_text(str(self._store.folder))  # for the agent

    # -- looking

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """What is computed is stored as it comes."""
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """A miss is never wrong; a hit may still fail when it is read."""
        asked = _asked(req_context)
        if key in asked.failed or self._transfers.stalled:
            return LookupResult.MISS
        if self._store.holds(key):
            return LookupResult.HIT
        return self._ask(key, asked) if self._options.shared else LookupResult.MISS

    def _ask(self, key: OffloadKey, asked: _Asked) -> LookupResult:
        """Another engine may have written it."""
        waits = not (self._overdue(asked.since_s) or self._overdue(self._looking_since_s))
        if waits and key not in asked.found:
            asked.found[key] = None
            self._questions.put((key, asked))
        found = asked.found.get(key)
        if found is None and waits:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def _overdue(self, since_s: float) -> bool:
        return time.monotonic() - since_s >= self._options.deadline_s

    def _answer(self) -> None:
        """Of requests that wait no more nothing is asked: a slow disk would never be done with them."""
        while True:
            key, asked = self._questions.get()
            if not self._overdue(asked.since_s):
                self._looking_since_s = time.monotonic()
                asked.found[key] = self._store.exists(key)
                self._looking_since_s = float("inf")

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Used, wherever from."""
        for key in keys:
            self._store.use(key)

    # -- moving

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Refused while as much of host memory waits to be written as may wait."""
        keys = list(job_metadata.keys)
        waiting = self._transfers.waiting_parts + len(keys)
        if waiting > self._rows // 2 or not self._mover.takes_writes:
            self._mover.counts.add("write_skipped", len(keys))
            self._refused.append(JobResult(job_metadata.job_id, success=False))
            return
        context = job_metadata.req_context  # there is no public way to ask it for the key at a position
        self._mover.place(_asked(context).trail.places(keys, context._offload_key_positions))
        self._submit(job_metadata, is_read=False)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Into rows of host memory that are ours until the job has ended."""
        self._submit(job_metadata, is_read=True)

    def _submit(self, job: TransferJob, *, is_read: bool) -> None:
        position = job.req_context.get_offload_key_position
        parts = [Part(key, int(row)) for key, row in zip(job.keys, job.chunk_ids, strict=True)]
        parts.sort(key=lambda part: position(part.key) or 0)  # parents first
        self._asked[job.job_id] = (job, _asked(job.req_context))
        self._transfers.submit(job.job_id, parts, is_read=is_read)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Those that ended, or were given up, since the last call."""
        return self._results(self._transfers.ended())

    def drain_jobs(self) -> None:
        """Gives up all jobs: no thread touches host memory behind this, and nothing is waited for."""
        self._refused = self._results(self._transfers.give_up_all())  # those refused before are among them

    def _results(self, ended: list[Ended]) -> list[JobResult]:
        out, self._refused = self._refused, []
        for end in ended:
            job, asked = self._asked.pop(end.id)
            if end.is_read and not end.whole:
                asked.failed |= set(job.keys) - set(end.done)
            if end.late:
                self._mover.counts.add("read_late" if end.is_read else "write_late", end.parts - len(end.done))
            if not end.is_read and end.done:
                self._events.append(self._event(end.done, removed=False))
            moved = len(end.done) * self.block_size_bytes
            out.append(JobResult(end.id, end.whole, end.done or None, end.seconds, moved))
        return out

    # -- telling

    def take_events(self) -> Iterator[OffloadingEvent]:
        """What came to disk by this engine's hand, and what went."""
        events, self._events = self._events, []
        yield from events
        if gone := self._store.take_removed():
            yield self._event(gone, removed=True)

    def _event(self, keys: Iterable[bytes], *, removed: bool) -> OffloadingEvent:
        return OffloadingEvent(
            keys=[OffloadKey(key) for key in keys], medium=self.medium, removed=removed, removal_expected=not removed
        )

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Beside vLLM's own, which know nothing of bytes on disk."""
        return dict(METRICS)

    def get_stats(self) -> OffloadingConnectorStats:
        """Since the last call."""
        stats = OffloadingConnectorStats()
        stats.set_gauge("prefixpool:disk_used_bytes", self._store.last_used)
        stats.set_gauge("prefixpool:disk_capacity_bytes", self._options.capacity_bytes)
        stats.set_gauge("prefixpool:disk_chunks", len(self._store))
        for event, count in dict(self._store.counts).items():
            if (new := count - self._told.get(event, 0)) > 0:
                stats.increase_counter("prefixpool:disk_events", new, (event,))
                self._told[event] = count
        return stats

    def shutdown(self) -> None:
        """Threads that hang are left to the end of the process."""
        self._transfers.stop()
        self._care.stop()


def _asked(context: ReqContext) -> _Asked:
    asked: _Asked | None = context.get_state(_Asked)
    if asked is None:
        asked = _Asked()
        context.set_state(asked)
    return asked


def _namespace(spec: OffloadingSpec, options: DiskOptions) -> bytes:
    config = spec.config
    groups = [(group.tokens_per_block, sorted(group.layer_names)) for group in config.groups]
    return namespace(
        config.model.name,
        {
            "dtype": config.model.dtype,
            "cache": [config.cache.tokens_per_hash, config.cache.blocks_per_chunk],
            "groups": groups,
            "parallel": [
                config.parallel.tp_size,
                config.parallel.pp_size,
                config.parallel.dcp_size,
                config.parallel.pcp_size,
            ],
            "bytes": config.worker_kv_bytes_per_block,
            "layout": [config.replicated_layout, config.canonical_layout, config.kv_cache_layout],
            "vllm": vllm.__version__,
            "setup": options.setup,
        },
        options.adapters,
    )
