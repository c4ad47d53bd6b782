"""Parameters of a decoder, counted from its config.json, and the bytes that they take as stored.

The formulas give the published totals exactly for the dense and mixture-of-experts models in core/tests. Where a model's
safetensors headers are at hand, their sizes are better than any formula: see `shape.with_stored_bytes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

Config = Mapping[str, Any]

# Bits of one quantised weight with its scales (group sizes as usually published).
FP8_BITS: Final = 8.01
MXFP4_BITS: Final = 4.25
NVFP4_BITS: Final = 4.5
GROUP_SCALE_BITS: Final = 0.16  # AWQ and GPTQ, groups of 128: a 16-bit scale and a 4-bit zero point


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of parameters, apart by how they are stored and split."""

    embedding: int  # one matrix, vocabulary by width; stored as it is
    embeddings: int  # 1 if input and output share it
    attention: int
    dense: int  # feed-forward layers that every token passes, shared experts included
    experts: int
    active_experts: int  # of `experts`: what one token passes
    down: int  # low-rank projections of MLA: the same on every tensor-parallel rank
    small: int  # norms and expert routers: the same on every rank, never quantised

    @property
    def total(self) -> int:
        return self.embedding * self.embeddings + self.linear + self.experts + self.small

    @property
    def active(self) -> int:
        """What one token passes; the table of input embeddings is looked up, but counts, as is usual in model names."""
        return self.total - self.experts + self.active_experts

    @property
    def linear(self) -> int:
        return self.attention + self.dense + self.down


class StoredBits(msgspec.Struct, frozen=True, kw_only=True):
    """Bits for each parameter, scales included."""

    base: float  # what is never quantised
    linear: float
    experts: float

    @classmethod
    def of(cls, config: Config) -> StoredBits:
        """From `torch_dtype` and `quantization_config`."""
        base = 32.0 if str(config.get("torch_dtype") or config.get("dtype")).endswith("float32") else 16.0
        quantised = config.get("quantization_config")
        if not quantised:
            return cls(base=base, linear=base, experts=base)
        bits = _quantised_bits(quantised)
        only_experts = quantised.get("quant_method") == "mxfp4"
        return cls(base=base, linear=base if only_experts else bits, experts=bits)


def _quantised_bits(quantised: Config) -> float:
    method = str(quantised.get("quant_method", "")).lower()
    if method == "mxfp4":
        return MXFP4_BITS
    if method in ("awq", "gptq", "auto-round"):
        return float(quantised.get("bits") or quantised.get("w_bit") or 4) + GROUP_SCALE_BITS
    if method == "bitsandbytes":
        return 4 + GROUP_SCALE_BITS if quantised.get("load_in_4bit") else FP8_BITS
    if method in ("compressed-tensors", "modelopt"):
        return _scheme_bits(quantised)
    return FP8_BITS  # fp8, fbgemm_fp8 and what else stores a byte


def _scheme_bits(quantised: Config) -> float:
    if "NVFP4" in str(quantised.get("quant_algo", "")):
        return NVFP4_BITS
    groups = quantised.get("config_groups") or {}
    found = [int((group.get("weights") or {}).get("num_bits") or 8) for group in groups.values()]
    return FP8_BITS if not found or max(found) >= 8 else max(found) + GROUP_SCALE_BITS


def count(config: Config) -> Parameters:
    """Parameters of a decoder (of the text part, where a model has several). Expects a config that `shape` has checked."""
    layers, width = int(config["num_hidden_layers"]), int(config["hidden_size"])
    linear_layers = int(config.get("_linear_layers", 0))
    attention, down = _attention(config)
    moe = _Experts.of(config, layers, width)
    dense_size = int(config.get("intermediate_size_mlp") or config["intermediate_size"])
    return Parameters(
        embedding=int(config["vocab_size"]) * width,
        embeddings=1 if _tied(config) else 2,
        attention=attention * (layers - linear_layers) + _linear_attention(config, width) * linear_layers,
        dense=(layers - moe.layers) * _matrices(config) * width * dense_size + moe.layers * moe.shared,
        experts=moe.layers * moe.experts,
        active_experts=moe.layers * moe.active,
        down=down * layers,
        small=width
        + layers * _norms(config, width)
        + (layers - linear_layers) * _head_norms(config)
        + linear_layers * int(config.get("linear_value_head_dim") or 0)
        + moe.layers * moe.router,
    )


def _tied(config: Config) -> bool:
    """Whether input and output share their table; families that leave it unsaid share it or not by their own default."""
    shared = config.get("tie_word_embeddings")
    return (
        str(config.get("model_type")).startswith(("gemma", "cohere", "gpt_bigcode", "falcon"))
        if shared is None
        else bool(shared)
    )


def _matrices(config: Config) -> int:
    """Matrices of one feed-forward layer: 3 where it is gated, as nearly everywhere."""
    return 2 if config.get("model_type") in ("gpt_bigcode", "falcon", "starcoder2", "gpt_neox", "phi") else 3


def _norms(config: Config, width: int) -> int:
    kind = str(config.get("model_type", ""))
    return (4 if kind.startswith(("gemma2", "gemma3")) else 2) * width


def _head_norms(config: Config) -> int:
    """Of queries and keys."""
    return 2 * int(config["head_dim"]) if str(config.get("model_type", "")).startswith(("qwen3", "gemma3")) else 0


def _attention(config: Config) -> tuple[int, int]:
    """Parameters of one layer: split over ranks, and the same on all."""
    width, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    if config.get("kv_lora_rank"):
        return _latent_attention(config, width, heads)
    kv_heads, size = int(config["num_key_value_heads"]), int(config["head_dim"])
    queries, keys = heads * size, kv_heads * size
    gated = 2 if config.get("model_type") in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text") else 1
    matrices = width * queries * gated + 2 * width * keys + queries * width
    kind = config.get("model_type")
    biases = queries + 2 * keys if kind == "qwen2" or config.get("attention_bias") else 0
    if kind == "gpt_oss":
        biases += width + heads  # of the output, and one attention sink for each head
    return matrices + biases, 0


def _latent_attention(config: Config, width: int, heads: int) -> tuple[int, int]:
    rank, rope = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
    plain, value = int(config["qk_nope_head_dim"]), int(config["v_head_dim"])
    query_rank = int(config.get("q_lora_rank") or 0)
    down = width * (rank + rope) + rank + (width * query_rank + query_rank if query_rank else 0)
    up = rank * heads * (plain + value) + (query_rank or width) * heads * (plain + rope) + heads * value * width
    return up, down


def _linear_attention(config: Config, width: int) -> int:
    """One gated delta net layer (Qwen3-Next and its kin); 0 for models without."""
    if not config.get("linear_num_value_heads"):
        return 0
    values = int(config["linear_num_value_heads"]) * int(config["linear_value_head_dim"])
    keys = int(config["linear_num_key_heads"]) * int(config["linear_key_head_dim"])
    heads = int(config["linear_num_value_heads"])
    projections = width * (2 * keys + 2 * values + 2 * heads) + values * width
    return projections + (2 * keys + values) * int(config["linear_conv_kernel_dim"]) + 2 * heads


class _Experts(NamedTuple):
    """Parameters of one layer with experts, and the number of such layers."""

    layers: int = 0
    experts: int = 0
    active: int = 0
    shared: int = 0
    router: int = 0

    @classmethod
    def of(cls, config: Config, layers: int, width: int) -> _Experts:
        number = int(config.get("n_routed_experts") or config.get("num_experts") or config.get("num_local_experts") or 0)
        if not number:
            return cls()
        size = int(config.get("moe_intermediate_size") or config["intermediate_size"])
        biased = config.get("model_type") == "gpt_oss"
        one = 3 * width * size + (2 * size + width if biased else 0)
        return cls(
            layers=_moe_layers(config, layers),
            experts=number * one,
            active=min(number, int(config.get("num_experts_per_tok") or 1)) * one,
            shared=3 * width * _shared_size(config, size),
            router=_router(config, number, width),
        )


def _shared_size(config: Config, size: int) -> int:
    if config.get("model_type") in ("llama4_text", "llama4"):
        return size
    return int(config.get("shared_expert_intermediate_size") or size * int(config.get("n_shared_experts") or 0))


def _router(config: Config, number: int, width: int) -> int:
    """A row for each expert, the gate of a shared expert, a bias for each (gpt-oss; DeepSeek V3, which balances with it)."""
    gate = width if config.get("shared_expert_intermediate_size") else 0
    biases = number if config.get("model_type") == "gpt_oss" or config.get("topk_method") == "noaux_tc" else 0
    return width * number + gate + biases


def _moe_layers(config: Config, layers: int) -> int:
    step = int(config.get("interleave_moe_layer_step") or config.get("decoder_sparse_step") or 1)
    return max(0, layers - int(config.get("first_k_dense_replace") or 0)) // step
