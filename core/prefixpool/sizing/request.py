"""What a plan is asked for, and what makes no sense to ask."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from prefixpool.sizing.catalogue import Accelerator
from prefixpool.sizing.errors import SizingError
from prefixpool.sizing.kv import DEFAULT_BLOCK_TOKENS, KvDtype
from prefixpool.sizing.memory import DEFAULT_UTILISATION_PERCENT, Batching
from prefixpool.sizing.parallel import Parallel
from prefixpool.sizing.shape import ModelShape
from prefixpool.sizing.tiers import HostLimits


class BudgetTier(StrEnum):
    """Where what must stay warm may lie."""

    DEVICE = "device"
    HOST = "host"


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """What must stay warm: `resident_tokens`, or `sessions` of `tokens_per_session`."""

    resident_tokens: int = 0
    sessions: int = 0
    tokens_per_session: int = 0
    tier: BudgetTier = BudgetTier.DEVICE


class SizingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults are the engine's."""

    shape: ModelShape
    accelerator: Accelerator
    parallel: Parallel = Parallel()
    kv_dtype: KvDtype = KvDtype.AUTO
    utilisation_percent: int = DEFAULT_UTILISATION_PERCENT
    max_model_len: int = 0  # 0: what the model says
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    batching: Batching | None = None  # None: vLLM's defaults for this device
    kv_bytes: int = 0  # for KV on each device, whatever else would fit; 0: all that is left
    host_bytes: int = 0  # of each replica
    disk_bytes: int = 0
    budget: Budget | None = None
    replicas: int = 1  # without a budget
    limits: HostLimits = HostLimits()  # of the engine's container, where somebody has set them

    @property
    def length(self) -> int:
        return self.max_model_len or self.shape.unasked_len or self.shape.max_model_len

    @property
    def batches(self) -> Batching:
        return self.batching or Batching.default(self.accelerator, self.parallel)


def checked(request: SizingRequest) -> SizingRequest:
    """The same request. SizingError names what is wrong with it."""
    if not 1 <= request.utilisation_percent <= 100:
        raise SizingError(f"memory utilisation is a percentage from 1 to 100, not {request.utilisation_percent}")
    if request.block_tokens < 1 or request.max_model_len < 0 or request.replicas < 0:
        raise SizingError("block size, longest sequence and replicas cannot be negative, nor the block size 0")
    if min(request.kv_bytes, request.host_bytes, request.disk_bytes) < 0:
        raise SizingError("sizes of device, host and disk tiers cannot be negative")
    if request.disk_bytes and not request.host_bytes:
        raise SizingError("blocks pass through host memory on their way to disk: a disk tier needs a host tier")
    if request.length > request.shape.max_model_len:
        raise SizingError(
            f"{request.shape.name} takes sequences of {request.shape.max_model_len:,} tokens at most, "
            f"not {request.max_model_len:,}"
        )
    if request.budget is not None:
        _check_budget(request.budget, request)
    return request


def _check_budget(budget: Budget, request: SizingRequest) -> None:
    by_session = bool(budget.sessions or budget.tokens_per_session)
    if bool(budget.resident_tokens) == by_session:
        raise SizingError("a budget is either resident tokens, or sessions with tokens per session")
    if by_session and (budget.sessions < 1 or budget.tokens_per_session < 1):
        raise SizingError("sessions and tokens per session are needed together, both at least 1")
    if budget.resident_tokens < 0:
        raise SizingError("resident tokens cannot be negative")
    if budget.tokens_per_session > request.length:
        raise SizingError(
            f"sessions of {budget.tokens_per_session:,} tokens are longer than the longest sequence ({request.length:,})"
        )
    if budget.tier is BudgetTier.HOST and not request.host_bytes:
        raise SizingError("a budget in the host tier needs host memory")
