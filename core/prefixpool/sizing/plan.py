"""From a model, accelerators and a budget to replicas and the reason: `plan(SizingRequest(...)) -> SizingPlan`.

Every figure of `status.sizing` comes from here, and so does what `prefixpool plan` prints. A request that does not fit gives
a plan too: by how many bytes, and changes that were tried and do fit.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from prefixpool.sizing import changes, memory, reasons, warning
from prefixpool.sizing.errors import SizingError
from prefixpool.sizing.kv import NULL_BLOCKS, KvDtype, KvLayout, bytes_per_token, layout
from prefixpool.sizing.parallel import check, stored_copies
from prefixpool.sizing.request import Budget, BudgetTier, SizingRequest, checked
from prefixpool.sizing.tiers import HostNeeds, TierSize, disk_tier, host_needs, host_tier
from prefixpool.sizing.warning import SizingWarning


class LimitedBy(StrEnum):
    """Which term decides."""

    WEIGHTS = "Weights"  # they do not fit
    OVERHEAD = "Overhead"  # weights fit, but not with what the engine needs besides
    LONGEST_SEQUENCE = "LongestSequence"  # one sequence of max_model_len does not fit
    DEVICE_KV = "DeviceKV"  # room for KV on the device
    HOST_KV = "HostKV"  # the host pool


class Source(StrEnum):
    """Whether an engine has confirmed the figures."""

    PLANNED = "Planned"
    MEASURED = "Measured"  # the engine reported its blocks


class SizingPlan(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Bytes are whole numbers; `per_replica` figures are over all its devices."""

    fits: bool
    limited_by: LimitedBy
    reason: str  # one sentence
    short_bytes: int  # by how much one device is too small; 0 if it fits
    changes: tuple[str, ...]  # each of them alone would make it fit
    weights_bytes: int  # of the model
    memory: memory.DeviceMemory  # of the fullest device
    kv_bytes_per_token: int  # over all devices, copies included
    block_tokens: int
    device_per_replica: TierSize
    host_per_replica: TierSize
    disk_per_replica: TierSize  # a shared disk: of all replicas together
    concurrent_sequences: float  # of max_model_len, on the device
    max_model_len: int
    sequences_per_step: int  # that the engine computes at once, if there are so many
    replicas: int
    sessions_per_replica: int  # of the budget's length, in the budget's tier; 0 without such a budget
    host_needs: HostNeeds
    warnings: tuple[SizingWarning, ...] = ()  # of what starts, but may not do what it is there for
    source: Source = Source.PLANNED


_NONE: Final = TierSize(bytes=0, blocks=0, tokens=0)


def plan(request: SizingRequest) -> SizingPlan:
    """SizingError if settings contradict each other or the engine would refuse them; else a plan, fitting or not."""
    wanted = checked(request)
    check(wanted.shape, wanted.parallel)
    sized = _Sized.of(wanted)
    limited = sized.limited_by()
    outcome = sized.outcome(sized.short)
    on_host = sized.divided.total if wanted.accelerator.host_memory else 0
    needs = host_needs(wanted.parallel, wanted.host_bytes, sized.disk.blocks, on_host)
    return SizingPlan(
        fits=not sized.short,
        limited_by=limited,
        reason=reasons.sentence(wanted, sized.divided, outcome),
        short_bytes=sized.short,
        changes=changes.that_fit(wanted, lambda other: not _Sized.of(other).short) if sized.short else (),
        weights_bytes=wanted.shape.weight_bytes,
        memory=sized.divided,
        kv_bytes_per_token=bytes_per_token(wanted.shape, wanted.kv_dtype, wanted.parallel),
        block_tokens=sized.layout.block_tokens,
        device_per_replica=sized.device,
        host_per_replica=sized.host,
        disk_per_replica=sized.disk,
        concurrent_sequences=round(sized.usable_blocks / sized.blocks_each, 2),
        max_model_len=wanted.length,
        sequences_per_step=wanted.batches.sequences,
        replicas=outcome.replicas,
        sessions_per_replica=outcome.sessions,
        host_needs=needs,
        warnings=(*sized.warnings, *warning.of_limits(needs, wanted.limits, "The engine's container")),
    )


def corrected(planned: SizingPlan, request: SizingRequest, blocks: int) -> SizingPlan:
    """The plan with the number of device blocks that a running engine reports. SizingError for a number below 2."""
    if blocks <= NULL_BLOCKS:
        raise SizingError(f"an engine reported {blocks} blocks; it has at least 2")
    wanted = checked(request)
    sized = msgspec.structs.replace(_Sized.of(wanted), blocks=blocks)
    outcome = sized.outcome(short=0)
    return msgspec.structs.replace(
        planned,
        fits=True,
        short_bytes=0,
        changes=(),
        limited_by=LimitedBy.HOST_KV if sized.on_host else LimitedBy.DEVICE_KV,
        reason=reasons.sentence(wanted, sized.divided, outcome),
        device_per_replica=sized.device,
        concurrent_sequences=round(sized.usable_blocks / sized.blocks_each, 2),
        replicas=outcome.replicas,
        sessions_per_replica=outcome.sessions,
        warnings=(*sized.warnings, *warning.of_limits(planned.host_needs, wanted.limits, "The engine's container")),
        source=Source.MEASURED,
    )


class _Sized(msgspec.Struct, frozen=True, kw_only=True):
    """Figures that do not depend on words."""

    request: SizingRequest
    layout: KvLayout
    divided: memory.DeviceMemory
    blocks: int  # on one device, the null block included

    @classmethod
    def of(cls, request: SizingRequest) -> _Sized:
        laid = layout(request.shape, request.kv_dtype, request.block_tokens, request.parallel)
        divided = memory.divide(
            request.shape, request.accelerator, request.parallel, request.batches, request.utilisation_percent
        )
        return cls(request=request, layout=laid, divided=divided, blocks=laid.blocks(request.kv_bytes or divided.room))

    @property
    def blocks_each(self) -> int:
        """For one sequence of the greatest length while it is computed."""
        return self.layout.blocks_for(self.request.length, self.request.batches.in_flight)

    @property
    def usable_blocks(self) -> int:
        return max(0, self.blocks - NULL_BLOCKS)

    @property
    def short(self) -> int:
        """Bytes by which one device, or what it may give to KV, is too small to start."""
        if self.usable_blocks < self.blocks_each:
            return (self.blocks_each + NULL_BLOCKS) * self.layout.block_bytes - (self.request.kv_bytes or self.divided.room)
        return max(0, self.request.kv_bytes - self.divided.room)

    @property
    def device(self) -> TierSize:
        return TierSize(
            bytes=self.blocks * self.layout.block_bytes * self.request.parallel.devices,
            blocks=self.blocks,
            tokens=int(self.usable_blocks / self.blocks_each * self.request.length),
        )

    @property
    def copies(self) -> int:
        return stored_copies(self.request.shape, self.request.parallel)

    @property
    def host(self) -> TierSize:
        pool = self.request.host_bytes
        return host_tier(self.layout, self.copies, pool, self.request.length) if pool else _NONE

    @property
    def disk(self) -> TierSize:
        size = self.request.disk_bytes
        return disk_tier(self.layout, self.copies, size, self.request.length) if size else _NONE

    @property
    def warnings(self) -> tuple[SizingWarning, ...]:
        longest = self.layout.blocks_for(self.request.length)
        return warning.of_tiers(self.device, self.host, self.disk, longest, self.request.host_bytes)

    @property
    def on_host(self) -> bool:
        """Whether the budget is met from the host pool. It holds copies of what the device has, so it must be the larger."""
        budget = self.request.budget
        return budget is not None and budget.tier is BudgetTier.HOST and self.host.blocks > self.usable_blocks

    @property
    def held(self) -> TierSize:
        """The tier that the budget counts."""
        return self.host if self.on_host else self.device

    def outcome(self, short: int) -> reasons.Outcome:
        replicas, sessions = self.replicas() if not short else (0, 0)
        return reasons.Outcome(short=short, held=self.held, on_host=self.on_host, replicas=replicas, sessions=sessions)

    def limited_by(self) -> LimitedBy:
        if self.short and self.divided.weights > self.divided.usable:
            return LimitedBy.WEIGHTS
        if self.short and self.divided.room <= 0:
            return LimitedBy.OVERHEAD
        if self.short:
            return LimitedBy.LONGEST_SEQUENCE
        return LimitedBy.HOST_KV if self.on_host else LimitedBy.DEVICE_KV

    def replicas(self) -> tuple[int, int]:
        """How many the budget needs, and the sessions that each holds (0 if the budget names none)."""
        budget = self.request.budget
        if budget is None:
            return self.request.replicas, 0
        if not budget.sessions:
            return -(-budget.resident_tokens // max(1, self.held.tokens)), 0  # an engine may report next to no blocks
        return self._for_sessions(budget)

    def _for_sessions(self, budget: Budget) -> tuple[int, int]:
        blocks = self.host.blocks if self.on_host else self.usable_blocks
        each = max(1, blocks // self.layout.blocks_for(budget.tokens_per_session))
        return -(-budget.sessions // each), each


__all__ = ["Budget", "BudgetTier", "KvDtype", "LimitedBy", "SizingPlan", "SizingRequest", "Source", "corrected", "plan"]
