"""PoolSpec: what a pool should be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

from msgspec import Meta

from prefixpool import engine_arguments
from prefixpool.api import reading
from prefixpool.api.engine import CPU, Accelerator, Engine, EngineKind
from prefixpool.api.kv_cache import KvBudget, KvCache
from prefixpool.api.model import Model
from prefixpool.api.placement import Placement
from prefixpool.api.router import Auth, Router
from prefixpool.api.struct import ApiStruct, Replicas, Rule, Seconds, Small
from prefixpool.errors import SettingsError
from prefixpool.sizing.request import BudgetTier

_NO_FIELD: Final = "the worker sets it, and pools have no field for it"
_INSTEAD: Final = {
    "--model": "set spec.model.source",
    "--served-model-name": "set spec.model.servedName",
    "--revision": "set spec.model.revision",
    "--tensor-parallel-size": "set spec.accelerator.tensorParallel",
    "--pipeline-parallel-size": "set spec.accelerator.pipelineParallel",
    "-tp": "set spec.accelerator.tensorParallel",
    "-pp": "set spec.accelerator.pipelineParallel",
    "--max-model-len": "set spec.engine.maxModelLen",
    "--block-size": "set spec.engine.blockSize",
    "--max-num-seqs": "set spec.engine.maxNumSeqs",
    "--gpu-memory-utilization": "set spec.kvCache.memoryUtilizationPercent",
    "--kv-cache-dtype": "set spec.kvCache.dtype",
    "--kv-transfer-config": "set spec.kvCache.host and spec.kvCache.disk",
    "--kv-offloading-size": "set spec.kvCache.host.memory",
    "--kv-offloading-backend": "set spec.kvCache.host.memory",
    "--num-gpu-blocks-override": "the sizing plan sets it",
    "--kv-cache-memory-bytes": "the sizing plan sets it",
    "--host": _NO_FIELD,
    "--port": _NO_FIELD,
    "--dtype": _NO_FIELD,
    "--enforce-eager": _NO_FIELD,
}


def _in_words_of_pools(rules: engine_arguments.Rules) -> engine_arguments.Rules:
    """The worker names its settings; who writes a spec knows fields."""
    long, short = ({flag: _INSTEAD.get(flag, reason) for flag, reason in part.items()} for part in rules)
    return engine_arguments.Rules(long, short)


_REFUSED: Final = {
    EngineKind.VLLM: _in_words_of_pools(engine_arguments.VLLM),
    EngineKind.SIM: _in_words_of_pools(engine_arguments.SIM),
}


class Rollout(ApiStruct, frozen=True, kw_only=True):
    """How changes reach replicas."""

    max_unavailable: Annotated[Small, Meta(description="Replicas that may be down at once while a change rolls out.")] = 1


class Drain(ApiStruct, frozen=True, kw_only=True):
    """How a replica ends."""

    timeout_seconds: Annotated[Seconds, Meta(description="How long running requests may take to end.")] = 60


class PoolSpec(ApiStruct, frozen=True, kw_only=True):
    """What a pool should be."""

    rules: ClassVar = (
        Rule(
            "!has(self.kvBudget) || self.kvBudget.tier != 'host' || has(self.kvCache.host)",
            "a budget in the host tier needs one: set kvCache.host.memory, or kvBudget.tier to device",
            lambda spec: not spec.kv_budget or spec.kv_budget.tier is not BudgetTier.HOST or spec.kv_cache.host is not None,
            ".kvBudget.tier",
        ),
        Rule(
            "has(self.kvBudget) || !(has(self.minReplicas) || has(self.maxReplicas))",
            "minReplicas and maxReplicas bound what kvBudget asks for: set kvBudget, or remove them and set replicas",
            lambda spec: spec.kv_budget is not None or (spec.min_replicas is None and spec.max_replicas is None),
        ),
        Rule(
            "!has(self.minReplicas) || !has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
            "minReplicas is above maxReplicas: swap them",
            lambda spec: spec.min_replicas is None or spec.max_replicas is None or spec.min_replicas <= spec.max_replicas,
            ".minReplicas",
        ),
        Rule(
            f"self.accelerator.resource != '{CPU}' || self.engine.kind != 'vllm' "
            "|| !has(self.engine.blockSize) || self.engine.blockSize % 32 == 0",
            "vLLM on CPUs takes block sizes that are multiples of 32: set engine.blockSize to 32 or 64, or leave it out",
            lambda spec: (
                not (spec.accelerator.on_cpu and spec.engine.kind is EngineKind.VLLM)
                or (spec.engine.block_size or 0) % 32 == 0
            ),
            ".engine.blockSize",
        ),
        Rule(
            "!(has(self.kvBudget) && has(self.kvBudget.tokensPerSession) && has(self.engine.maxModelLen)) "
            "|| self.kvBudget.tokensPerSession <= self.engine.maxModelLen",
            "sessions are longer than the longest sequence: raise engine.maxModelLen or lower kvBudget.tokensPerSession",
            lambda spec: (
                spec.kv_budget is None
                or (spec.kv_budget.tokens_per_session or 0) <= (spec.engine.max_model_len or 100_000_000)
            ),
            ".kvBudget.tokensPerSession",
        ),
    )

    model: Annotated[Model, Meta(description="What is served, and from where.")]
    engine: Annotated[Engine, Meta(description="The engine of each replica.")] = Engine()
    accelerator: Annotated[Accelerator, Meta(description="What one replica computes on.")] = Accelerator()
    placement: Annotated[Placement, Meta(description="On which nodes pods run.")] = Placement()
    kv_cache: Annotated[KvCache, Meta(description="Where KV lies, and how it is stored.")] = KvCache()
    kv_budget: Annotated[
        KvBudget | None, Meta(description="What must stay warm. It sizes the pool while nothing else sets replicas.")
    ] = None
    replicas: Annotated[
        Replicas | None,
        Meta(description="Replicas; `kubectl scale` and autoscalers set it. Left out: kvBudget decides, or 1 without one."),
    ] = None
    min_replicas: Annotated[Replicas | None, Meta(description="Fewest replicas that kvBudget may ask for.")] = None
    max_replicas: Annotated[Replicas | None, Meta(description="Most replicas that kvBudget may ask for.")] = None
    paused: Annotated[bool, Meta(description="The operator changes nothing; what runs, runs on.")] = False
    router: Annotated[
        Router,
        Meta(
            description="The routers of the pool. In Sidecar mode they are part of each replica's pod, so a change of "
            "anything here replaces replicas, by the rules of rollout; in Deployment mode it replaces routers only."
        ),
    ] = Router()
    auth: Annotated[Auth, Meta(description="Who may send requests.")] = Auth()
    rollout: Annotated[Rollout, Meta(description="How changes reach replicas.")] = Rollout()
    drain: Annotated[Drain, Meta(description="How a replica ends.")] = Drain()

    @classmethod
    def from_object(cls, obj: Mapping[str, Any]) -> PoolSpec:
        """Of a whole InferencePool. SpecError names the field: `spec.kvCache.host.memory: "12Gx" is not a quantity; …`."""
        reading.check_name(obj)
        spec = reading.read(cls, obj.get("spec"), "spec")
        try:
            engine_arguments.check(spec.engine.extra_args, _REFUSED[spec.engine.kind])
        except SettingsError as error:
            raise reading.SpecError(f"spec.engine.extraArgs: {error}") from error
        return spec
