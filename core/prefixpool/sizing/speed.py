"""Bounds on speed that follow from a shape and a device: they say what is impossible, and where a tier pays.

Decoding reads all active weights and the sequence's KV once for each token, so memory bandwidth bounds it. A cached prefix
pays where loading it is faster than computing it again; both grow with its length, and loading has a start-up time.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from prefixpool.sizing.catalogue import Accelerator
from prefixpool.sizing.kv import KvDtype, bytes_per_sequence, bytes_per_token
from prefixpool.sizing.parallel import Parallel, copies, stored_copies
from prefixpool.sizing.shape import LayerKind, ModelShape

BANDWIDTH_SHARE: Final = 0.8  # of the peak, reached by good kernels (aiconfigurator)
COMPUTE_SHARE: Final = 0.4  # of the peak, in prefill: 0.3 to 0.5 is usual
HOST_START_S: Final = 0.002  # one batch of copies is queued and waited for
DISK_START_S: Final = 0.010
DISK_BYTES_PER_S: Final = 3e9  # one local NVMe device


class BreakEven(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Where loading a prefix from a tier beats computing it again. `tokens` is None if it never does."""

    tier: str
    tokens: int | None
    load_s_per_token: float
    recompute_s_per_token: float  # of the first tokens; later ones cost more


def decode_tokens_per_s(shape: ModelShape, device: Accelerator, parallel: Parallel, dtype: KvDtype, tokens: int) -> float:
    """Upper bound for one sequence of this length, alone on a replica. Pipeline stages take turns, and add nothing.

    Copied KV is read on each rank; the few weights that all ranks hold are left out of account.
    """
    copied = max(copies(layers, parallel) for layers in shape.kv)
    read = shape.active_weight_bytes + bytes_per_sequence(shape, dtype, tokens) * copied
    return device.bandwidth * BANDWIDTH_SHARE * parallel.tensor / read


def recompute_s_per_token(shape: ModelShape, device: Accelerator, parallel: Parallel) -> tuple[float, float]:
    """Seconds for each token of prefill, and seconds more for each token before it (attention)."""
    peak = device.fp8 if shape.bits.linear <= 8.5 else device.bf16
    second = peak * COMPUTE_SHARE * parallel.devices
    matrices = shape.parameters.active - shape.parameters.embedding * shape.parameters.embeddings
    full = sum(layers.count for layers in shape.kv if layers.kind in (LayerKind.FULL, LayerKind.LATENT))
    return 2 * matrices / second, 4 * full * shape.heads * shape.head_size / (device.bf16 * COMPUTE_SHARE * parallel.devices)


def break_even(shape: ModelShape, device: Accelerator, parallel: Parallel, dtype: KvDtype) -> tuple[BreakEven, ...]:
    """For host and disk."""
    first, growth = recompute_s_per_token(shape, device, parallel)
    everywhere = bytes_per_token(shape, dtype, parallel)
    stored = everywhere * stored_copies(shape, parallel) // parallel.devices if parallel.pipeline == 1 else everywhere
    host = everywhere / (device.host_link * BANDWIDTH_SHARE * parallel.devices)
    disk = max(host, stored / DISK_BYTES_PER_S)
    return (
        _break_even("host", host, HOST_START_S, (first, growth)),
        _break_even("disk", disk, DISK_START_S, (first, growth)),
    )


def _break_even(tier: str, load: float, start: float, recompute: tuple[float, float]) -> BreakEven:
    """Smallest n with `start + load·n <= first·n + growth·n²/2`: the positive root of a quadratic."""
    first, growth = recompute
    gain = first - load
    tokens: float | None = None
    if growth > 0:
        tokens = (-gain + math.sqrt(gain * gain + 2 * growth * start)) / growth
    elif gain > 0:
        tokens = start / gain
    return BreakEven(
        tier=tier,
        tokens=None if tokens is None else math.ceil(tokens),
        load_s_per_token=load,
        recompute_s_per_token=first,
    )
