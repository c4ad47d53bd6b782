"""What of a model matters for memory: which KV each layer keeps, how many parameters there are, how they are stored.

`parse` takes a decoded Hugging Face config.json; `with_stored_bytes` puts the exact size of the files in place of a count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

import msgspec

from prefixpool.sizing import length
from prefixpool.sizing.config import checked
from prefixpool.sizing.errors import ShapeError
from prefixpool.sizing.weights import Parameters, StoredBits, count

_WEIGHTS_MOST: Final = 1 << 50  # bytes; what follows from it is still a number that a pool's status can hold


class LayerKind(StrEnum):
    """What a layer keeps of the past."""

    FULL = "full"  # keeps all tokens
    WINDOW = "window"  # keeps the last `window` tokens
    CHUNK = "chunk"  # keeps the current chunk of `window` tokens
    LATENT = "latent"  # MLA: one compressed vector for each token, whatever the number of heads
    STATE = "state"  # linear attention, Mamba: a state of constant size


class KvLayers(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that keep the same kind of KV."""

    kind: LayerKind
    count: int
    heads: int = 1  # KV heads
    values: int = 0  # numbers kept for each head and token: 2 × head size, or latent and rope parts of MLA
    window: int = 0  # tokens
    state_bytes: int = 0  # the state of one layer

    @property
    def grows(self) -> bool:
        """Whether a longer sequence always takes more."""
        return self.kind in (LayerKind.FULL, LayerKind.LATENT)


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A model, as sizing sees it. Bytes of weights are those of the whole model, not of a rank."""

    name: str
    kv: tuple[KvLayers, ...]
    parameters: Parameters
    bits: StoredBits
    layers: int
    hidden: int
    intermediate: int  # width that one token passes in a feed-forward layer
    heads: int
    head_size: int
    vocabulary: int
    max_model_len: int  # tokens at most
    unasked_len: int = 0  # tokens that the engine takes if nobody asks for more; 0: max_model_len
    stored_bytes: int = 0  # from safetensors headers; 0: not known

    @property
    def attention(self) -> str:
        """In words: MHA, GQA, MQA, MLA, with what is mixed in."""
        return " + ".join(dict.fromkeys(_words(layers, self.heads) for layers in self.kv))

    @property
    def formula_bytes(self) -> int:
        """Bytes of all weights by count and type, each part rounded up to whole bytes."""
        split, same = self._formula_parts()
        return split + same

    @property
    def weight_bytes(self) -> int:
        return self.stored_bytes or self.formula_bytes

    @property
    def active_weight_bytes(self) -> int:
        """Bytes of weights that one token reads."""
        skipped = int((self.parameters.experts - self.parameters.active_experts) * self.bits.experts / 8)
        skipped += int(self.parameters.embedding * self.bits.base / 8) * (self.parameters.embeddings - 1)
        stored = max(0, self.weight_bytes - skipped * self.weight_bytes // max(1, self.formula_bytes))
        return stored // self.loaded_parts

    @property
    def loaded_parts(self) -> int:
        """One part in so many of the stored bytes is what the engine keeps: it casts weights of 32 bits to 16."""
        return 2 if self.bits.linear == 32 else 1

    @property
    def replicated_bytes(self) -> int:
        """Of `weight_bytes`: what every tensor-parallel rank holds whole."""
        return self._formula_parts()[1]

    def _formula_parts(self) -> tuple[int, int]:
        counts, bits = self.parameters, self.bits
        split = (
            counts.embedding * counts.embeddings * bits.base
            + (counts.attention + counts.dense) * bits.linear
            + counts.experts * bits.experts
        )
        same = counts.down * bits.linear + counts.small * bits.base
        return -int(-split // 8), -int(-same // 8)


def with_stored_bytes(shape: ModelShape, stored_bytes: int) -> ModelShape:
    """The same model with the exact size of its files. ShapeError for sizes that cannot be."""
    if stored_bytes <= shape.replicated_bytes:
        raise ShapeError(f"{shape.name}: {stored_bytes} bytes of weights cannot be all of it (headers of a part?)")
    _check_bytes(stored_bytes, shape.name)
    return msgspec.structs.replace(shape, stored_bytes=stored_bytes)


def by_hand(  # figures that a person gives; weights are not told apart by kind
    *,
    name: str,
    kv: tuple[KvLayers, ...],
    weight_bytes: int,
    hidden: int,
    intermediate: int,
    heads: int,
    vocabulary: int,
    max_model_len: int,
) -> ModelShape:
    """A shape from bare figures. All weights count as split over tensor-parallel ranks, and as read for each token."""
    return ModelShape(
        name=name,
        kv=kv,
        parameters=Parameters(
            embedding=0, embeddings=1, attention=0, dense=weight_bytes // 2, experts=0, active_experts=0, down=0, small=0
        ),
        bits=StoredBits(base=16, linear=16, experts=16),
        layers=sum(layers.count for layers in kv),
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        head_size=max(1, hidden // heads),
        vocabulary=vocabulary,
        max_model_len=max_model_len,
        stored_bytes=weight_bytes,
    )


def parse(config: Mapping[str, Any], name: str = "model") -> ModelShape:
    """From a decoded config.json; of models with several parts, the text part. ShapeError names what is missing or odd."""
    sound = checked(config, name)
    kv = _kv_layers(sound)
    linear = sum(layers.count for layers in kv if layers.kind is LayerKind.STATE)
    found = ModelShape(
        name=name,
        kv=kv,
        parameters=count({**sound, "_linear_layers": linear}),
        bits=StoredBits.of(sound),
        layers=int(sound["num_hidden_layers"]),
        hidden=int(sound["hidden_size"]),
        intermediate=_token_width(sound),
        heads=int(sound["num_attention_heads"]),
        head_size=_score_width(sound),
        vocabulary=int(sound["vocab_size"]),
        max_model_len=length.longest(sound),
        unasked_len=length.unasked(sound),
    )
    _check_bytes(found.formula_bytes, name)
    return found


def _check_bytes(weight_bytes: int, name: str) -> None:
    if weight_bytes > _WEIGHTS_MOST:
        raise ShapeError(f"{name}: {weight_bytes} bytes of weights cannot be; no model has more than {_WEIGHTS_MOST}")


def _score_width(config: Mapping[str, Any]) -> int:
    """Mean width of a head's scores and values: what attention costs for each pair of tokens."""
    if config.get("kv_lora_rank"):
        parts = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return sum(int(config[part]) for part in parts) // 2
    return int(config["head_dim"])


def _token_width(config: Mapping[str, Any]) -> int:
    size = config.get("moe_intermediate_size")
    if not size:
        return int(config["intermediate_size"]) * int(config.get("num_experts_per_tok") or 1)
    active = int(config.get("num_experts_per_tok") or 1) + int(config.get("n_shared_experts") or 0)
    dense = int(config["intermediate_size"]) if config.get("first_k_dense_replace") else 0
    return max(int(size) * active + int(config.get("shared_expert_intermediate_size") or 0), dense)


def _kv_layers(config: Mapping[str, Any]) -> tuple[KvLayers, ...]:
    """In the order in which the kinds first come up, as the engine groups them."""
    counts = Counter(_layer_kinds(config))
    return tuple(_layers_of(kind, number, config) for kind, number in counts.items())


def _layers_of(kind: LayerKind, number: int, config: Mapping[str, Any]) -> KvLayers:
    if kind is LayerKind.LATENT:
        return KvLayers(kind=kind, count=number, values=int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"]))
    if kind is LayerKind.STATE:
        return KvLayers(kind=kind, count=number, state_bytes=_state_bytes(config))
    window = {LayerKind.WINDOW: "sliding_window", LayerKind.CHUNK: "attention_chunk_size"}.get(kind)
    return KvLayers(
        kind=kind,
        count=number,
        heads=int(config["num_key_value_heads"]),
        values=2 * int(config["head_dim"]),
        window=int(config[window]) if window else 0,
    )


def _state_bytes(config: Mapping[str, Any]) -> int:
    """Gated delta net: the last inputs of its convolution as the model computes, and a matrix for each value head."""
    keys = int(config["linear_num_key_heads"]) * int(config["linear_key_head_dim"])
    values = int(config["linear_num_value_heads"]) * int(config["linear_value_head_dim"])
    convolution = (2 * keys + values) * (int(config["linear_conv_kernel_dim"]) - 1)
    exact = 4 if config.get("mamba_ssm_dtype") == "float32" else 2
    return convolution * 2 + values * int(config["linear_key_head_dim"]) * exact


_NAMED_KINDS: Final = {
    "full_attention": LayerKind.FULL,
    "attention": LayerKind.FULL,
    "sliding_attention": LayerKind.WINDOW,
    "chunked_attention": LayerKind.CHUNK,
    "linear_attention": LayerKind.STATE,
}


_NEEDS: Final = {
    LayerKind.STATE: "linear_num_value_heads",
    LayerKind.CHUNK: "attention_chunk_size",
}


def _layer_kinds(config: Mapping[str, Any]) -> list[LayerKind]:
    layers = int(config["num_hidden_layers"])
    if config.get("kv_lora_rank"):
        return [LayerKind.LATENT] * layers
    if config.get("linear_num_value_heads") or config.get("layer_types"):
        return _named_kinds(config, layers)
    if config.get("attention_chunk_size"):
        rope = config.get("no_rope_layers") or [0 if index % 4 == 3 else 1 for index in range(layers)]
        return [LayerKind.CHUNK if flag else LayerKind.FULL for flag in rope]
    if config.get("sliding_window") and config.get("use_sliding_window") is not False:
        return _windowed_kinds(config, layers)
    return [LayerKind.FULL] * layers


def _named_kinds(config: Mapping[str, Any], layers: int) -> list[LayerKind]:
    every = int(config.get("full_attention_interval") or 4)
    named = config.get("layer_types") or [
        "full_attention" if index % every == every - 1 else "linear_attention" for index in range(layers)
    ]
    unknown = {str(kind) for kind in named} - _NAMED_KINDS.keys()
    if unknown or len(named) != layers:
        raise ShapeError(f"`layer_types` names {sorted(unknown)} or has not {layers} entries: give the figures by hand")
    kinds = [_NAMED_KINDS[kind] for kind in named]
    for kind, field in _NEEDS.items():
        if kind in kinds and not config.get(field):
            raise ShapeError(f"`layer_types` has {kind.value} layers, but config.json no `{field}`")
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        kinds = [LayerKind.FULL if kind is LayerKind.WINDOW else kind for kind in kinds]
    return kinds


def _windowed_kinds(config: Mapping[str, Any], layers: int) -> list[LayerKind]:
    """Every layer, or all but each nth, has a window."""
    every = config.get("sliding_window_pattern") or {"gemma2": 2, "gemma3_text": 6}.get(str(config.get("model_type")))
    if not every:
        return [LayerKind.WINDOW] * layers
    return [LayerKind.FULL if index % int(every) == int(every) - 1 else LayerKind.WINDOW for index in range(layers)]


def _words(layers: KvLayers, heads: int) -> str:
    if layers.kind is LayerKind.LATENT:
        return "MLA"
    if layers.kind is LayerKind.STATE:
        return "linear layers"
    sharing = "MHA" if layers.heads == heads else "MQA" if layers.heads == 1 else "GQA"
    return sharing if layers.grows else f"{sharing} in {'windows' if layers.kind is LayerKind.WINDOW else 'chunks'}"
