"""Well-known models and accelerators, as data.

Models are their config.json, shortened to what sizing reads. Sources: the published config.json of each model, as collected
by aiconfigurator (2026); those marked † from memory, checked by their published number of parameters. Accelerators: memory
that the driver shows, and peak figures of vendors' data sheets (`AIC`: aiconfigurator; `pub`: vendor; `mem`: from memory).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from prefixpool.sizing.errors import SizingError
from prefixpool.sizing.shape import ModelShape, parse

_GIB: Final = 1 << 30


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """One device. Bandwidths are peaks; `speed` says which share of them is reached."""

    name: str
    memory: int  # bytes
    bandwidth: float  # bytes per second, device memory
    bf16: float  # dense floating-point operations per second
    fp8: float  # the same; equal to bf16 where the device has none
    host_link: float  # bytes per second and direction
    source: str = ""
    host_memory: bool = False  # computes in the host's own memory


def _device(
    name: str, gib: float, terabytes_s: float, teraflops: tuple[float, float], link: float, source: str
) -> Accelerator:
    return Accelerator(
        name=name,
        memory=int(gib * _GIB),
        bandwidth=terabytes_s * 1e12,
        bf16=teraflops[0] * 1e12,
        fp8=teraflops[1] * 1e12,
        host_link=link * 1e9,
        source=source,
    )


_PCIE4: Final = 32.0
_PCIE5: Final = 64.0
_C2C: Final = 450.0

# name, memory as shown (GiB), TB/s, (bf16, fp8) Tflop/s, host link GB/s, source
ACCELERATORS: Final[Mapping[str, Accelerator]] = {
    device.name: device
    for device in (
        _device("a10g", 22.5, 0.60, (70, 70), _PCIE4, "mem"),
        _device("l4", 22.5, 0.30, (121, 242), _PCIE4, "AIC"),
        _device("l40s", 45.0, 0.864, (362, 733), _PCIE4, "AIC"),
        _device("a100-40", 40.0, 1.555, (312, 312), _PCIE4, "mem"),
        _device("a100-80", 80.0, 2.039, (312, 312), _PCIE4, "AIC"),
        _device("h100", 79.6, 3.35, (989, 1979), _PCIE5, "AIC"),
        _device("h100-pcie", 79.6, 2.0, (756, 1513), _PCIE5, "AIC"),
        _device("h200", 140.0, 4.8, (989, 1979), _PCIE5, "AIC"),
        _device("b200", 179.0, 7.7, (2250, 4500), _PCIE5, "AIC"),
        _device("b300", 268.6, 7.75, (2250, 4500), _PCIE5, "AIC"),
        _device("gh200", 95.0, 4.0, (989, 1979), _C2C, "mem"),
        _device("gb200", 185.0, 8.0, (2500, 5000), _C2C, "AIC"),
        _device("mi300x", 191.5, 5.3, (1307, 2615), _PCIE5, "pub"),
        _device("mi325x", 255.5, 6.0, (1307, 2615), _PCIE5, "pub"),
        _device("mi355x", 287.5, 8.0, (2500, 5000), _PCIE5, "mem"),
        _device("gaudi3", 128.0, 3.7, (1835, 1835), _PCIE5, "mem"),
        _device("tpu-v5e", 16.0, 0.819, (197, 197), _PCIE4, "pub"),
        _device("tpu-v6e", 32.0, 1.638, (918, 918), _PCIE5, "pub"),
        _device("rtx-pro-6000", 95.6, 1.79, (468, 936), _PCIE5, "AIC"),
    )
}


def _dense(
    kind: str, sizes: tuple[int, int, int], heads: tuple[int, int, int], vocabulary: int, **more: Any
) -> dict[str, Any]:
    """`sizes`: layers, width, feed-forward width. `heads`: of queries, of KV, size."""
    return {
        "model_type": kind,
        "num_hidden_layers": sizes[0],
        "hidden_size": sizes[1],
        "intermediate_size": sizes[2],
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "vocab_size": vocabulary,
        "torch_dtype": "bfloat16",
        **more,
    }


def _length(tokens: int) -> dict[str, Any]:
    return {"max_position_embeddings": tokens}


def _qwen_moe(sizes: tuple[int, int, int], heads: tuple[int, int, int], experts: tuple[int, int, int]) -> dict[str, Any]:
    number, active, width = experts
    return _dense(
        "qwen3_moe", sizes, heads, 151936, num_experts=number, num_experts_per_tok=active, moe_intermediate_size=width,
    )  # fmt: skip


_TIED: Final = {"tie_word_embeddings": True}
_DEEPSEEK_HEAD: Final = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_GEMMA_3: Final = {"sliding_window": 1024, "sliding_window_pattern": 6, **_TIED, **_length(131072)}
_BLOCK_FP8: Final = {"quantization_config": {"quant_method": "fp8"}}
_MXFP4: Final = {"quantization_config": {"quant_method": "mxfp4"}}
_GPT_OSS: Final = {"sliding_window": 128, "num_experts_per_tok": 4, "attention_bias": True, **_MXFP4, **_length(131072)}
_DEEPSEEK_V3: Final = {
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "q_lora_rank": 1536, "topk_method": "noaux_tc",
    **_DEEPSEEK_HEAD, **_BLOCK_FP8, **_length(163840),
}  # fmt: skip

CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "smollm2-135m": _dense("llama", (30, 576, 1536), (9, 3, 64), 49152, **_TIED, **_length(8192)),
    "llama-3.2-1b": _dense("llama", (16, 2048, 8192), (32, 8, 64), 128256, **_TIED, **_length(131072)),
    "llama-3.2-3b": _dense("llama", (28, 3072, 8192), (24, 8, 128), 128256, **_TIED, **_length(131072)),
    "llama-3.1-8b": _dense("llama", (32, 4096, 14336), (32, 8, 128), 128256, **_length(131072)),
    "llama-3.1-70b": _dense("llama", (80, 8192, 28672), (64, 8, 128), 128256, **_length(131072)),
    "llama-3.3-70b": _dense("llama", (80, 8192, 28672), (64, 8, 128), 128256, **_length(131072)),
    "llama-3.1-405b": _dense("llama", (126, 16384, 53248), (128, 8, 128), 128256, **_length(131072)),
    "qwen2.5-7b": _dense("qwen2", (28, 3584, 18944), (28, 4, 128), 152064, **_length(32768)),  # †
    "qwen2.5-32b": _dense("qwen2", (64, 5120, 27648), (40, 8, 128), 152064, **_length(32768)),  # †
    "qwen2.5-72b": _dense("qwen2", (80, 8192, 29568), (64, 8, 128), 152064, **_length(32768)),  # †
    "qwen3-8b": _dense("qwen3", (36, 4096, 12288), (32, 8, 128), 151936, **_length(40960)),
    "qwen3-32b": _dense("qwen3", (64, 5120, 25600), (64, 8, 128), 151936, **_length(40960)),
    "qwen3-30b-a3b": _qwen_moe((48, 2048, 6144), (32, 4, 128), (128, 8, 768)) | _length(40960),
    "qwen3-235b-a22b": _qwen_moe((94, 4096, 12288), (64, 4, 128), (128, 8, 1536)) | _length(40960),
    "qwen3-coder-480b": _qwen_moe((62, 6144, 8192), (96, 8, 128), (160, 8, 2560)) | _length(262144),
    "mistral-7b": _dense("mistral", (32, 4096, 14336), (32, 8, 128), 32768, **_length(32768)),  # †
    "mistral-small-24b": _dense("mistral", (40, 5120, 32768), (32, 8, 128), 131072, **_length(32768)),  # †
    "mixtral-8x7b": _dense(
        "mixtral", (32, 4096, 14336), (32, 8, 128), 32000, num_local_experts=8, num_experts_per_tok=2, **_length(32768)
    ),
    "gemma-3-4b": _dense("gemma3_text", (34, 2560, 10240), (8, 4, 256), 262208, **_GEMMA_3),  # †
    "gemma-3-27b": _dense("gemma3_text", (62, 5376, 21504), (32, 16, 128), 262208, **_GEMMA_3),  # †
    "phi-4": _dense("phi3", (40, 5120, 17920), (40, 10, 128), 100352, **_length(16384)),  # †
    "gpt-oss-20b": _dense(
        "gpt_oss", (24, 2880, 2880), (64, 8, 64), 201088, num_local_experts=32, **_GPT_OSS,
        layer_types=["sliding_attention", "full_attention"] * 12,
    ),
    "gpt-oss-120b": _dense(
        "gpt_oss", (36, 2880, 2880), (64, 8, 64), 201088, num_local_experts=128, **_GPT_OSS,
        layer_types=["sliding_attention", "full_attention"] * 18,
    ),
    "qwen3-next-80b-a3b": _dense(
        "qwen3_next", (48, 2048, 5120), (16, 2, 256), 151936, num_experts=512, num_experts_per_tok=10,
        moe_intermediate_size=512, shared_expert_intermediate_size=512, full_attention_interval=4, linear_conv_kernel_dim=4,
        linear_num_key_heads=16, linear_key_head_dim=128, linear_num_value_heads=32, linear_value_head_dim=128,
        **_length(262144),
    ),
    "llama-4-scout": _dense(
        "llama4_text", (48, 5120, 8192), (40, 8, 128), 202048, intermediate_size_mlp=16384, num_local_experts=16,
        num_experts_per_tok=1, interleave_moe_layer_step=1, attention_chunk_size=8192, **_length(10485760),
    ),
    "deepseek-v3": _dense("deepseek_v3", (61, 7168, 18432), (128, 128, 56), 129280, **_DEEPSEEK_V3),
    "deepseek-r1": _dense("deepseek_v3", (61, 7168, 18432), (128, 128, 56), 129280, **_DEEPSEEK_V3),
}  # fmt: skip


def model(name: str) -> ModelShape:
    """By name, in any case, with or without its publisher and `-instruct`. SizingError names what there is."""
    found = find(name)
    if found is None:
        raise SizingError(f"no model {name!r} in the catalogue; it has {', '.join(CONFIGS)}")
    return found


def find(name: str) -> ModelShape | None:
    """As `model`; None if it is not there."""
    wanted = name.lower().rstrip("/").rsplit("/", 1)[-1]
    names = (wanted, wanted.removesuffix("-instruct"), wanted.removesuffix("-it"))
    return next((parse(CONFIGS[known], known) for known in names if known in CONFIGS), None)


def cpu(memory: int) -> Accelerator:
    """CPUs, and the memory that a whole replica may take. Speeds are not known."""
    return Accelerator(name="cpu", memory=memory, bandwidth=0, bf16=0, fp8=0, host_link=0, host_memory=True)


def device_like(product: str, memory: int) -> Accelerator:
    """A device as a node names it (`NVIDIA-A100-SXM4-80GB`), with the memory that it has; speeds are 0 if it is unknown."""
    words = re.split(r"[^a-z0-9]+", product.lower())
    alike = [one for one in ACCELERATORS.values() if one.name.split("-")[0] in words]
    if not alike:
        return Accelerator(name=product, memory=memory, bandwidth=0, bf16=0, fp8=0, host_link=0)
    return msgspec.structs.replace(min(alike, key=lambda one: abs(one.memory - memory)), memory=memory)


def accelerator(name: str) -> Accelerator:
    """By name, in any case. SizingError names what there is."""
    found = ACCELERATORS.get(name.lower())
    if found is None:
        raise SizingError(f"no accelerator {name!r} in the catalogue; it has {', '.join(ACCELERATORS)}")
    return found
