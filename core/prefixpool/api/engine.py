"""`spec.engine` and `spec.accelerator`: what computes, and on what."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar, Final

from msgspec import Meta, field

from prefixpool.api.quantity import Amount, Bytes
from prefixpool.api.struct import ATOMIC, BY_NAME, ApiStruct, ObjectName, Path, Rule, Small, Text, Timeout, Tokens

CPU: Final = "cpu"

_BlockTokens = Annotated[int, Meta(ge=1, le=4096)]
_Sequences = Annotated[int, Meta(ge=1, le=65_536)]
_Value = Annotated[str, Meta(max_length=4096)]
_Amounts = Annotated[dict[Text, Amount], Meta(max_length=16)]


class EngineKind(StrEnum):
    """Which engine runs."""

    VLLM = "vllm"
    SIM = "sim"


class SecretKey(ApiStruct, frozen=True, kw_only=True):
    """One key of a Secret."""

    name: Annotated[ObjectName, Meta(description="Name of the Secret.")]
    key: Annotated[Text, Meta(description="Key in it.")]


class EnvSource(ApiStruct, frozen=True, kw_only=True):
    """Where a variable's value comes from."""

    secret_key_ref: Annotated[SecretKey, Meta(description="Key of a Secret in the pool's namespace.")]


class EnvVar(ApiStruct, frozen=True, kw_only=True):
    """One environment variable."""

    rules: ClassVar = (
        Rule(
            "!(has(self.value) && has(self.valueFrom))",
            "a variable has value or valueFrom: remove one of them",
            lambda env: env.value is None or env.value_from is None,
        ),
        Rule(
            "!self.name.startsWith('PREFIXPOOL_')",
            "variables named PREFIXPOOL_… are the operator's: use the fields of the spec",
            lambda env: not env.name.startswith("PREFIXPOOL_"),
            ".name",
        ),
    )

    name: Annotated[str, Meta(description="Name of the variable.", pattern="^[A-Za-z_][A-Za-z0-9_]*$", max_length=253)]
    value: Annotated[_Value | None, Meta(description="Its value.")] = None
    value_from: Annotated[EnvSource | None, Meta(description="Where its value comes from.")] = None


class PullSecret(ApiStruct, frozen=True, kw_only=True):
    """A Secret for an image registry."""

    name: Annotated[ObjectName, Meta(description="Name of the Secret.")]


class Resources(ApiStruct, frozen=True, kw_only=True):
    """What a container asks for."""

    requests: Annotated[_Amounts, Meta(description="What the scheduler sets aside, such as cpu: 8.")] = field(
        default_factory=dict
    )
    limits: Annotated[_Amounts, Meta(description="What the container may use at most.")] = field(default_factory=dict)


class Engine(ApiStruct, frozen=True, kw_only=True):
    """The engine of each replica."""

    rules: ClassVar = (
        Rule(
            "self.kind != 'vllm' || !has(self.blockSize) || self.blockSize % 8 == 0",
            "vLLM takes block sizes that are multiples of 8: set engine.blockSize to 16 or 32, or leave it out",
            lambda engine: engine.kind is not EngineKind.VLLM or (engine.block_size or 0) % 8 == 0,
            ".blockSize",
        ),
    )

    kind: Annotated[EngineKind, Meta(description="vllm, or sim: a simulated engine without a model.")] = EngineKind.VLLM
    image: Annotated[
        Path | None, Meta(description="Image of the worker; by default the one that the operator was installed with.")
    ] = None
    image_pull_secrets: Annotated[
        tuple[PullSecret, ...],
        Meta(description="Secrets for the image's registry.", max_length=16, extra_json_schema=BY_NAME),
    ] = ()
    extra_args: Annotated[
        tuple[_Value, ...],
        Meta(
            description="More arguments of the engine, one an entry; those that undo the pool's are refused.",
            max_length=64,
            extra_json_schema=ATOMIC,
        ),
    ] = ()
    env: Annotated[
        tuple[EnvVar, ...],
        Meta(description="Environment of engine and agent.", max_length=64, extra_json_schema=BY_NAME),
    ] = ()
    resources: Annotated[
        Resources | None,
        Meta(
            description="Requests and limits. Where they are not given here, memory is computed from the sizing plan, and a "
            "core is asked for each device, and one more."
        ),
    ] = None
    max_model_len: Annotated[
        Tokens | None, Meta(description="Longest prompt plus answer, in tokens; by default what the model takes.")
    ] = None
    block_size: Annotated[_BlockTokens | None, Meta(description="Tokens of one KV block; by default the engine's own.")] = (
        None
    )
    max_num_seqs: Annotated[_Sequences | None, Meta(description="Sequences in one step; by default the engine's own.")] = (
        None
    )
    startup_timeout_seconds: Annotated[
        Timeout | None,
        Meta(
            description="How long a start may take, once the model's files are there; by default computed from the size of "
            "the weights."
        ),
    ] = None


class Accelerator(ApiStruct, frozen=True, kw_only=True):
    """What one replica computes on."""

    rules: ClassVar = (
        Rule(
            f"self.resource == '{CPU}' || self.resource.contains('/')",
            f"devices have names with a slash, such as nvidia.com/gpu: write accelerator.resource in full, or {CPU}",
            lambda device: device.resource == CPU or "/" in device.resource,
            ".resource",
        ),
        Rule(
            f"self.resource != '{CPU}' || has(self.memory)",
            "on CPUs, accelerator.memory says how much memory weights, KV cache and engine may take: set it, such as 16Gi",
            lambda device: device.resource != CPU or device.memory is not None,
            ".memory",
        ),
        Rule(
            f"self.resource != '{CPU}' || (self.tensorParallel == 1 && self.pipelineParallel == 1)",
            "a replica on CPUs is one device: set tensorParallel and pipelineParallel to 1, and add replicas instead",
            lambda device: device.resource != CPU or device.devices == 1,
        ),
    )
    immutable: ClassVar = dict.fromkeys(
        ("resource", "tensorParallel", "pipelineParallel"),
        "pods on other devices are another pool: create a new InferencePool and delete this one",
    )

    resource: Annotated[
        Text, Meta(description=f"Extended resource of one device, such as nvidia.com/gpu or amd.com/gpu; or `{CPU}`.")
    ] = "nvidia.com/gpu"
    memory: Annotated[
        Bytes | None,
        Meta(
            description="Memory of one device, as its driver shows it; by default read from nodes. On CPUs: of the replica."
        ),
    ] = None
    tensor_parallel: Annotated[Small, Meta(description="Devices that share each layer.")] = 1
    pipeline_parallel: Annotated[Small, Meta(description="Devices that share the layers out.")] = 1

    @property
    def devices(self) -> int:
        """Of one replica."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def on_cpu(self) -> bool:
        return self.resource == CPU
