"""Reads a config.json at the edge: what is missing or odd is named here, so that the rest may trust its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from prefixpool.sizing.errors import ShapeError

_NEEDED: Final = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_OLD_NAMES: Final = (("n_embd", "hidden_size"), ("n_layer", "num_hidden_layers"), ("n_head", "num_attention_heads"))
# What makes layers unlike one another in ways that the engine plans for and this module does not: refused, never guessed.
_NO_CLOSED_FORM: Final = {
    **dict.fromkeys(("ssm_state_size", "mamba_d_state", "mamba_num_heads"), "Mamba layers"),
    **dict.fromkeys(("index_topk", "compress_ratios"), "sparse attention with a cache of its own"),
    **dict.fromkeys(("global_head_dim", "num_global_key_value_heads", "swa_head_dim", "swa_num_key_value_heads",
                     "block_configs", "num_attention_groups"), "layers with KV heads of several shapes"),
    "num_kv_shared_layers": "layers that share their KV",
    "linear_attn_config": "linear attention of another kind",
    "attn_type_list": "linear attention of another kind",
    "is_encoder_decoder": "an encoder, whose KV is kept besides",
    "cross_attention_layers": "cross attention, whose KV is kept besides",
}  # fmt: skip
_WHOLE: Final = (
    "num_key_value_heads", "head_dim", "intermediate_size", "intermediate_size_mlp", "moe_intermediate_size",
    "shared_expert_intermediate_size", "n_inner", "num_experts", "n_routed_experts", "num_local_experts", "n_shared_experts",
    "num_experts_per_tok", "first_k_dense_replace", "interleave_moe_layer_step", "decoder_sparse_step", "sliding_window",
    "sliding_window_pattern", "attention_chunk_size", "full_attention_interval", "max_position_embeddings", "n_positions",
    "original_max_position_embeddings",
    *(_LATENT := ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")), "q_lora_rank",
    *(_LINEAR := ("linear_num_value_heads", "linear_value_head_dim", "linear_num_key_heads", "linear_key_head_dim",
                  "linear_conv_kernel_dim")),
)  # fmt: skip
_ROPES: Final = ("rope_scaling", "rope_parameters")
_KINDS: Final = {"text_config": dict, "quantization_config": dict, "layer_types": list, "no_rope_layers": list,
                 **dict.fromkeys(_ROPES, dict)}  # fmt: skip
_READ: Final = frozenset((
    *_NEEDED, *_WHOLE, *_KINDS, *(old for old, _ in _OLD_NAMES), "model_type", "torch_dtype", "dtype", "multi_query",
    "attention_bias", "tie_word_embeddings", "topk_method", "use_sliding_window", "mamba_ssm_dtype",
    "quant_method", "quant_algo", "bits", "w_bit", "load_in_4bit", "config_groups", "weights", "num_bits",
    "rope_type", "type", "factor", "full_attention", "sliding_attention", "chunked_attention",
    *_NO_CLOSED_FORM,
))  # fmt: skip
_KIND_WORDS: Final = {dict: "an object", list: "a list"}
# No model has more. Layers are looked at one by one, and a config is what somebody else wrote.
_LAYERS_MOST: Final = 10_000
_MOST: Final = 1 << 31
_BITS: Final = ("bits", "w_bit")
_BITS_MOST: Final = 32


def checked(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The text part, with names and defaults as most models have them. ShapeError names the field that is missing or odd."""
    text = config.get("text_config")
    found = {**config, **(text if isinstance(text, Mapping) else {})}
    for old, new in _OLD_NAMES:
        if old in found:
            found.setdefault(new, found[old])
    for field in _NEEDED:
        value = found.get(field)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ShapeError(f"{name}: config.json has no usable `{field}` (found {value!r}); a whole number is needed")
    _check_numbers(found, name)
    _check_quantised(found.get("quantization_config") or {}, name)
    for field, what in _NO_CLOSED_FORM.items():
        if found.get(field):
            raise ShapeError(f"{name}: {what} (`{field}`) cannot be sized from config.json here; give the figures by hand")
    if found.get("multi_query"):
        found.setdefault("num_key_value_heads", 1)
    found["num_key_value_heads"] = found.get("num_key_value_heads") or found["num_attention_heads"]
    found["head_dim"] = found.get("head_dim") or found["hidden_size"] // found["num_attention_heads"]
    if not found["head_dim"]:
        raise ShapeError(
            f"{name}: `hidden_size` {found['hidden_size']} leaves nothing for each of {found['num_attention_heads']} heads, "
            "and config.json has no `head_dim`"
        )
    found["intermediate_size"] = found.get("intermediate_size") or found.get("n_inner") or 4 * found["hidden_size"]
    return found


def _check_quantised(quantised: Mapping[str, Any], name: str) -> None:
    """How many bits its weights take, wherever that is said."""
    groups = quantised.get("config_groups") or {}
    weights = _objects(groups, "weights") if isinstance(groups, Mapping) else None
    if weights is None:
        raise ShapeError(f"{name}: `config_groups` in config.json is {groups!r}; an object of objects is needed")
    said = [(field, quantised.get(field)) for field in _BITS] + [("num_bits", one.get("num_bits")) for one in weights]
    for field, value in said:
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _BITS_MOST
        ):
            raise ShapeError(f"{name}: `{field}` in config.json is {value!r}; a number of bits up to {_BITS_MOST} is needed")


def _objects(holders: Mapping[str, Any], name: str) -> list[Mapping[str, Any]] | None:
    """What each of the holders has under this name. None if one of them, or what it has, is no object."""
    if not all(isinstance(holder, Mapping) for holder in holders.values()):
        return None
    found = [holder.get(name) or {} for holder in holders.values()]
    return found if all(isinstance(one, Mapping) for one in found) else None


def needed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Only the fields that sizing reads; of objects in it as well."""
    return {
        name: needed(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if (name in _READ or name.startswith("group_")) and value is not None
    }


def _check_numbers(config: Mapping[str, Any], name: str) -> None:
    """Fields that may be absent, but not odd; and families of fields that are there together."""
    for field in _WHOLE:
        value = config.get(field)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise ShapeError(f"{name}: `{field}` in config.json is {value!r}; a whole number is needed")
    for field in (*_NEEDED, *_WHOLE):
        most = _LAYERS_MOST if field == "num_hidden_layers" else _MOST
        if (config.get(field) or 0) > most:
            raise ShapeError(f"{name}: `{field}` in config.json is {config[field]}; no model has more than {most}")
    for family in (_LATENT, _LINEAR):
        if config.get(family[0]) and (missing := [field for field in family if not config.get(field)]):
            raise ShapeError(
                f"{name}: config.json has `{family[0]}`, but not {', '.join(f'`{field}`' for field in missing)}"
            )
    for field, kind in _KINDS.items():
        if config.get(field) and not isinstance(config[field], kind):
            raise ShapeError(f"{name}: `{field}` in config.json is {config[field]!r}; {_KIND_WORDS[kind]} is needed")
