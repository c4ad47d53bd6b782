"""Changes to a request that does not fit. Each is tried before it is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from msgspec.structs import replace

from prefixpool.sizing.catalogue import ACCELERATORS
from prefixpool.sizing.errors import SizingError
from prefixpool.sizing.kv import KvDtype
from prefixpool.sizing.memory import GIB
from prefixpool.sizing.parallel import Parallel, check
from prefixpool.sizing.request import SizingRequest

Fits = Callable[[SizingRequest], bool]

_UTILISATION_MOST: Final = 95  # above, other users of the device's memory are not unlikely to break it
_TENSOR: Final = (2, 4, 8, 16)
_MEMORY_GIB: Final = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_USEFUL_LENGTH: Final = 1024  # tokens; a shorter greatest length helps nobody


def that_fit(request: SizingRequest, fits: Fits) -> tuple[str, ...]:
    """In words, the least intrusive first."""
    return tuple(words for words in _tried(request, fits))


def _tried(request: SizingRequest, fits: Fits) -> Iterator[str]:
    if request.kv_bytes and fits(replace(request, kv_bytes=0)):
        yield f"all that is left for KV (now {request.kv_bytes / GIB:,.1f} GiB are asked for)"
    if request.utilisation_percent < _UTILISATION_MOST and fits(replace(request, utilisation_percent=_UTILISATION_MOST)):
        yield f"memory utilisation {_UTILISATION_MOST} % (now {request.utilisation_percent} %)"
    if request.kv_dtype is not KvDtype.FP8 and fits(replace(request, kv_dtype=KvDtype.FP8)):
        yield "KV in fp8"
    if length := _longest(request, fits):
        yield f"a longest sequence of {length:,} tokens (now {request.length:,})"
    for tensor in () if request.accelerator.host_memory else _TENSOR:
        if tensor > request.parallel.tensor and _tensor_fits(request, tensor, fits):
            yield f"tensor parallelism {tensor} (now {request.parallel.tensor})"
            break
    if request.accelerator.host_memory:
        yield from _more_memory(request, fits)
        return
    for device in sorted(ACCELERATORS.values(), key=lambda one: one.memory):
        if device.memory > request.accelerator.memory and fits(replace(request, accelerator=device)):
            yield f"devices with more memory, such as {device.name}"
            break


def _more_memory(request: SizingRequest, fits: Fits) -> Iterator[str]:
    """Of a replica on CPUs, in steps that people choose."""
    for size in _MEMORY_GIB:
        more = replace(request.accelerator, memory=size * GIB)
        if more.memory > request.accelerator.memory and fits(replace(request, accelerator=more)):
            yield f"{size} GiB of memory (now {request.accelerator.memory / GIB:,.1f} GiB)"
            return


def _tensor_fits(request: SizingRequest, tensor: int, fits: Fits) -> bool:
    wider = Parallel(tensor=tensor, pipeline=request.parallel.pipeline)
    try:
        check(request.shape, wider)
    except SizingError:  # the model cannot be split that way: not a change to name
        return False
    return fits(replace(request, parallel=wider))


def _longest(request: SizingRequest, fits: Fits) -> int:
    """The greatest length that fits, in whole blocks; 0 if none is useful. More tokens never take less room: bisection."""
    unit = request.block_tokens
    low, high = _USEFUL_LENGTH // unit, request.length // unit
    if high <= low or not fits(replace(request, max_model_len=low * unit)):
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(replace(request, max_model_len=middle * unit)) else (low, middle)
    budget = request.budget
    return low * unit if budget is None or budget.tokens_per_session <= low * unit else 0
