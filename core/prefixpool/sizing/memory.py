"""What the memory of one device goes to.

vLLM takes `utilisation × total`, measures weights, the peak of a trial run and CUDA graphs, and gives the rest to the KV
cache. Before a pod runs nothing can be measured, so the terms are estimated, on the careful side: a plan that is a little
small starts, one that is a little large dies with "No available memory for the cache blocks".
"""

from __future__ import annotations

from typing import Final

import msgspec

from prefixpool.sizing.catalogue import Accelerator
from prefixpool.sizing.parallel import Parallel, rank_weight_bytes
from prefixpool.sizing.shape import ModelShape

GIB: Final = 1 << 30
DEFAULT_UTILISATION_PERCENT: Final = 92  # vLLM's own since 0.21

_CONTEXT: Final = GIB * 6 // 10  # the driver's context and libraries
_CPU_CONTEXT: Final = GIB * 5 // 2  # API server, engine, agent: Python, torch, shared memory; 1.7 to 2.4 GiB measured
_COMMUNICATION: Final = GIB * 4 // 10  # buffers of NCCL, with more than one device
_GRAPHS_LEAST: Final = GIB * 3 // 10
_GRAPHS_MOST: Final = GIB * 3 // 2
_GRAPHS_OF_WEIGHTS: Final = 20  # one part in so many of the weights: overhead grows with the model
_LARGE_DEVICE: Final = 70 * GIB  # from here on, vLLM batches more (but on A100, where it does not pay)
_HUGE_DEVICE: Final = 160 * GIB


class Batching(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine step may hold."""

    tokens: int  # max_num_batched_tokens
    sequences: int  # max_num_seqs
    concurrent: int = 2  # steps in flight: one in each pipeline stage, and the next one is scheduled meanwhile

    @property
    def in_flight(self) -> int:
        return self.tokens * self.concurrent

    @classmethod
    def default(cls, accelerator: Accelerator, parallel: Parallel) -> Batching:
        """vLLM's defaults for its API server (0.32, `EngineArgs.get_batch_defaults`, `max_concurrent_batches`)."""
        if accelerator.host_memory:
            return cls(tokens=2048 * parallel.devices, sequences=128 * parallel.devices, concurrent=parallel.pipeline)
        concurrent = parallel.pipeline + 1
        if accelerator.memory >= _HUGE_DEVICE:
            return cls(tokens=16384, sequences=1024, concurrent=concurrent)
        if accelerator.memory >= _LARGE_DEVICE and not accelerator.name.startswith("a100"):
            return cls(tokens=8192, sequences=1024, concurrent=concurrent)
        return cls(tokens=2048, sequences=256, concurrent=concurrent)


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one device. `weights + activations + graphs + context + kv <= usable <= total`, unless it does not fit."""

    total: int
    usable: int
    weights: int
    activations: int
    graphs: int
    context: int

    @property
    def overhead(self) -> int:
        return self.activations + self.graphs + self.context

    @property
    def room(self) -> int:
        """For the KV cache; negative if not even the weights fit."""
        return self.usable - self.weights - self.overhead

    @property
    def kv(self) -> int:
        return max(0, self.room)


def divide(
    shape: ModelShape, accelerator: Accelerator, parallel: Parallel, batching: Batching, utilisation_percent: int
) -> DeviceMemory:
    """Bytes on the fullest device of a replica."""
    weights = rank_weight_bytes(shape, parallel)
    graphs = min(max(weights // _GRAPHS_OF_WEIGHTS, _GRAPHS_LEAST), _GRAPHS_MOST)
    context = _CONTEXT + (_COMMUNICATION if parallel.devices > 1 else 0)
    return DeviceMemory(
        total=accelerator.memory,
        usable=accelerator.memory * utilisation_percent // 100,
        weights=weights,
        activations=activation_bytes(shape, parallel, batching),
        graphs=0 if accelerator.host_memory else graphs,
        context=_CPU_CONTEXT if accelerator.host_memory else context,
    )


def activation_bytes(shape: ModelShape, parallel: Parallel, batching: Batching) -> int:
    """Peak of a full batch: hidden states, the widest feed-forward layer, and logits in 32 bits, twice (sampling sorts)."""
    hidden = batching.tokens * (4 * shape.hidden + 3 * -(-shape.intermediate // parallel.tensor)) * 2
    logits = batching.sequences * shape.vocabulary * 4 * 2 // parallel.tensor
    return hidden * 12 // 10 + logits
