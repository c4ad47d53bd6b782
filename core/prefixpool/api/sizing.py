"""From a spec to a `SizingRequest`: which shape, which device, which settings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Final, NamedTuple

from msgspec.structs import replace

from prefixpool.api.engine import Accelerator as AcceleratorSpec
from prefixpool.api.engine import EngineKind
from prefixpool.api.model import Model, ShapeFigures
from prefixpool.api.quantity import Bytes
from prefixpool.api.spec import PoolSpec
from prefixpool.sizing import catalogue, shape
from prefixpool.sizing.catalogue import Accelerator
from prefixpool.sizing.inspection import Inspection
from prefixpool.sizing.kv import CPU_BLOCK_TOKENS, DEFAULT_BLOCK_TOKENS
from prefixpool.sizing.memory import DEFAULT_UTILISATION_PERCENT, Batching
from prefixpool.sizing.parallel import Parallel
from prefixpool.sizing.plan import SizingPlan
from prefixpool.sizing.request import Budget, SizingRequest
from prefixpool.sizing.shape import KvLayers, ModelShape
from prefixpool.sizing.tiers import HostLimits

NO_SHAPE: Final = (
    "nothing is known of this model: spec.model.shape is not given, the catalogue does not have it, "
    "and no inspection of its files has succeeded; any one of the three is enough"
)
NO_DEVICE: Final = (
    "nothing is known of the device's memory: set spec.accelerator.memory, or let the operator read nodes with the "
    "label nvidia.com/gpu.memory or ResourceSlices"
)
_BATCHED_TOKENS: Final = "--max-num-batched-tokens"
_NUMBER: Final = re.compile(r"(\d+(?:\.\d+)?)([kKmM]?)", re.ASCII)
_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}


class ShapeSource(StrEnum):
    """Where a model's figures come from."""

    SPEC = "Spec"
    CATALOGUE = "Catalogue"
    INSPECTION = "Inspection"


class KnownShape(NamedTuple):
    """A shape, and who says so."""

    shape: ModelShape
    source: ShapeSource


def known_shape(model: Model, kind: EngineKind, inspected: Inspection | None = None) -> KnownShape | None:
    """By hand, from the catalogue, from an inspection. None: none of them (see `NO_SHAPE`). ShapeError: an odd config.json.

    A folder's name says little of what is in it, so the catalogue answers for names on the Hub (and for simulations) only.
    """
    if model.shape is not None:
        return KnownShape(_by_hand(model.shape, model.name), ShapeSource.SPEC)
    listed = kind is EngineKind.SIM or not model.source.startswith("/")
    if listed and (found := catalogue.find(model.source)):
        return KnownShape(found, ShapeSource.CATALOGUE)
    if inspected is not None:
        return KnownShape(inspected.shape(model.name), ShapeSource.INSPECTION)
    return None


def known_device(spec: AcceleratorSpec, product: str = "", memory_bytes: int = 0) -> Accelerator | None:
    """`product` and `memory_bytes`: what nodes say. None: nobody says how much memory there is (`NO_DEVICE`)."""
    memory = int(spec.memory or memory_bytes)
    if spec.on_cpu:
        return catalogue.cpu(memory)
    return catalogue.device_like(product or spec.resource, memory) if memory else None


def sizing_request(spec: PoolSpec, model: ModelShape, device: Accelerator) -> SizingRequest:
    """What to ask `sizing.plan.plan`. Contradictions are found there (SizingError)."""
    parallel = Parallel(tensor=spec.accelerator.tensor_parallel, pipeline=spec.accelerator.pipeline_parallel)
    cache = spec.kv_cache
    return SizingRequest(
        shape=model,
        accelerator=device,
        parallel=parallel,
        kv_dtype=cache.dtype,
        utilisation_percent=cache.memory_utilization_percent or DEFAULT_UTILISATION_PERCENT,
        max_model_len=spec.engine.max_model_len or 0,
        block_tokens=spec.engine.block_size or _block_tokens(spec),
        batching=_batching(spec, Batching.default(device, parallel)),
        host_bytes=int(cache.host.memory) if cache.host else 0,
        disk_bytes=int(cache.disk.size) if cache.disk else 0,
        budget=_budget(spec),
        replicas=1,
        limits=HostLimits(memory=_memory_limit(spec)),
    )


def budgeted_replicas(spec: PoolSpec, plan: SizingPlan) -> int:
    """Replicas while nobody else sets them: the budget's, within minReplicas and maxReplicas; 1 without a budget."""
    fewest, most = spec.min_replicas or 0, spec.max_replicas
    wanted = max(plan.replicas, fewest)
    return wanted if most is None else min(wanted, most)


def _block_tokens(spec: PoolSpec) -> int:
    on_host = spec.accelerator.on_cpu or spec.engine.kind is EngineKind.SIM
    return CPU_BLOCK_TOKENS if on_host else DEFAULT_BLOCK_TOKENS


def _batching(spec: PoolSpec, default: Batching) -> Batching:
    return replace(
        default,
        sequences=spec.engine.max_num_seqs or default.sequences,
        tokens=_given(spec.engine.extra_args, _BATCHED_TOKENS) or default.tokens,
    )


def _given(args: Sequence[str], flag: str) -> int:
    """The last value of a flag, as `--flag=8192` or in two entries; 0: not given, or no number.

    As vLLM reads it: with underscores as well, and 8k for 8,000, 8K for 8,192.
    """
    words = [word for one in args for word in one.split("=", 1)]
    values = [_number(value) for name, value in pairwise(words) if name.replace("_", "-") == flag]
    return next((value for value in reversed(values) if value), 0)


def _number(text: str) -> int:
    found = _NUMBER.fullmatch(text.strip())
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def _memory_limit(spec: PoolSpec) -> int:
    """Of the engine's container, as its pods get it: a request alone is a limit, too. 0: as planned."""
    given = spec.engine.resources
    written = (given.limits.get("memory") or given.requests.get("memory")) if given else None
    try:
        return int(Bytes.parse(written)) if written else 0
    except ValueError:  # a quantity, but none of bytes: the API server says so
        return 0


def _budget(spec: PoolSpec) -> Budget | None:
    wanted = spec.kv_budget
    if wanted is None:
        return None
    return Budget(
        resident_tokens=wanted.resident_tokens or 0,
        sessions=wanted.sessions or 0,
        tokens_per_session=wanted.tokens_per_session or 0,
        tier=wanted.tier,
    )


def _by_hand(figures: ShapeFigures, name: str) -> ModelShape:
    kv = tuple(
        KvLayers(
            kind=one.kind,
            count=one.layers,
            heads=one.heads,
            values=one.values_per_token or 0,
            window=one.window or 0,
            state_bytes=int(one.state_bytes or 0),
        )
        for one in figures.kv
    )
    return shape.by_hand(
        name=name,
        kv=kv,
        weight_bytes=int(figures.weights),
        hidden=figures.hidden_size,
        intermediate=figures.intermediate_size,
        heads=figures.attention_heads,
        vocabulary=figures.vocabulary_size,
        max_model_len=figures.max_model_len,
    )
