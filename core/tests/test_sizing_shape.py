"""Reading config.json: every kind of attention, quantised weights, errors that name the field; parallelism."""

from typing import Any

import pytest

from prefixpool.sizing import catalogue, inspection, kv, parallel, shape, stored
from prefixpool.sizing.config import needed
from prefixpool.sizing.errors import ShapeError, SizingError
from prefixpool.sizing.kv import KvDtype
from prefixpool.sizing.parallel import Parallel
from prefixpool.sizing.plan import SizingRequest, plan
from prefixpool.sizing.shape import LayerKind

BASE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 4096,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}


def kinds(config: dict[str, Any]) -> dict[str, int]:
    return {layers.kind.value: layers.count for layers in shape.parse(config).kv}


@pytest.mark.parametrize(("heads", "words"), [(16, "MHA"), (4, "GQA"), (1, "MQA")])
def test_sharing_of_kv_heads(heads: int, words: str) -> None:
    found = shape.parse({**BASE, "num_key_value_heads": heads})
    assert found.attention == words
    assert kv.bytes_per_token(found, KvDtype.AUTO) == 2 * 12 * heads * 64 * 2


def test_without_kv_heads_there_are_as_many_as_heads() -> None:
    assert shape.parse({**BASE, "num_key_value_heads": None}).kv[0].heads == 16


def test_gemma_shares_its_embeddings_even_where_its_config_does_not_say_so() -> None:
    unsaid = shape.parse({**BASE, "model_type": "gemma3_text", "head_dim": 64})
    assert unsaid.parameters.embeddings == 1
    assert (
        shape.parse(
            {**BASE, "model_type": "gemma3_text", "head_dim": 64, "tie_word_embeddings": False}
        ).parameters.embeddings
        == 2
    )
    assert shape.parse(BASE).parameters.embeddings == 2


def test_a_head_size_of_its_own_wins_over_width_by_heads() -> None:
    assert shape.parse({**BASE, "head_dim": 128}).kv[0].values == 256


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, {"full": 12}),
        ({"sliding_window": 1024}, {"window": 12}),
        ({"sliding_window": 1024, "use_sliding_window": False}, {"full": 12}),
        ({"sliding_window": None}, {"full": 12}),
        ({"sliding_window": 1024, "sliding_window_pattern": 6}, {"window": 10, "full": 2}),
        ({"sliding_window": 1024, "model_type": "gemma2"}, {"window": 6, "full": 6}),
        ({"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 6}, {"window": 6, "full": 6}),
        ({"layer_types": ["full_attention"] * 12}, {"full": 12}),
        ({"attention_chunk_size": 8192, "no_rope_layers": [1, 1, 1, 0] * 3}, {"chunk": 9, "full": 3}),
    ],
)
def test_windows_and_chunks(more: dict[str, Any], expected: dict[str, int]) -> None:
    assert kinds({**BASE, **more}) == expected


def test_the_text_part_of_a_model_with_images_counts() -> None:
    assert shape.parse({"model_type": "gemma3", "text_config": BASE}).kv == shape.parse(BASE).kv


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
@pytest.mark.parametrize("value", [None, 0, -1, "many", True])
def test_a_missing_or_odd_field_is_named(field: str, value: object) -> None:
    with pytest.raises(ShapeError, match=f"`{field}`"):
        shape.parse({**BASE, field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 1 << 31),  # 17 GB and two minutes of whoever sized it
        ("num_hidden_layers", 10**30),
        ("vocab_size", 1 << 63),
        ("max_position_embeddings", 1 << 32),
    ],
)
def test_layers_without_end_took_all_memory_of_the_operator(field: str, value: int) -> None:
    with pytest.raises(ShapeError, match=f"`{field}`.*no model has more"):
        shape.parse({**BASE, field: value})


def test_weights_of_more_bytes_than_a_status_can_hold_are_refused() -> None:
    with pytest.raises(ShapeError, match="bytes of weights cannot be"):
        shape.parse({**BASE, "hidden_size": 1 << 31, "intermediate_size": 1 << 31})
    with pytest.raises(ShapeError, match="bytes of weights cannot be"):
        shape.with_stored_bytes(shape.parse(BASE), 1 << 62)


@pytest.mark.parametrize(
    ("quantised", "field"),
    [
        ({"quant_method": "compressed-tensors", "config_groups": []}, ""),
        ({"quant_method": "compressed-tensors", "config_groups": [{}]}, "config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": "x"}}, "config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": 5}}}, "config_groups"),
        ({"quant_method": "modelopt", "config_groups": {"group_0": {"weights": {"num_bits": "x"}}}}, "num_bits"),
        ({"quant_method": "gptq", "bits": [4]}, "bits"),
        ({"quant_method": "awq", "w_bit": "four"}, "w_bit"),
        ({"quant_method": "awq", "bits": 1e308}, "bits"),
    ],
)
def test_odd_bits_of_quantised_weights_ended_in_a_traceback(quantised: dict[str, Any], field: str) -> None:
    config = {**BASE, "quantization_config": quantised}
    if not field:
        assert shape.parse(config).weight_bytes
        return
    with pytest.raises(ShapeError, match=f"`{field}`"):
        shape.parse(config)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("mamba_d_state", 128, "Mamba layers"),
        ("index_topk", 2048, "sparse attention"),  # DeepSeek V3.2
        ("num_global_key_value_heads", 4, "KV heads of several shapes"),  # Gemma 4
        ("num_kv_shared_layers", 15, "share their KV"),  # Gemma 3n
        ("linear_attn_config", {"kda_layers": [1]}, "linear attention of another kind"),  # Kimi Linear
        ("is_encoder_decoder", True, "an encoder"),
    ],
)
def test_what_has_no_closed_form_is_refused_rather_than_guessed(field: str, value: object, words: str) -> None:
    with pytest.raises(ShapeError, match=f"{words}.*`{field}`.*give the figures by hand"):
        shape.parse({**BASE, field: value})


def test_fields_that_say_no_are_no_reason_to_refuse() -> None:
    assert shape.parse({**BASE, "num_kv_shared_layers": 0, "is_encoder_decoder": False}) == shape.parse(BASE)


def test_unknown_layer_types_are_named() -> None:
    with pytest.raises(ShapeError, match="psychic_attention"):
        shape.parse({**BASE, "layer_types": ["psychic_attention"] * 12})


@pytest.mark.parametrize(
    ("quantised", "bits"),
    [
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "awq", "bits": 4}, 4.16),
        ({"quant_method": "gptq", "bits": 8}, 8.16),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}, 4.16),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, 8),
    ],
)
def test_quantised_weights_shrink_but_embeddings_and_norms_do_not(quantised: dict[str, Any], bits: float) -> None:
    plain, small = shape.parse(BASE), shape.parse({**BASE, "quantization_config": quantised})
    kept = plain.weight_bytes - plain.parameters.linear * 2
    assert small.weight_bytes == pytest.approx(kept + plain.parameters.linear * bits / 8, rel=0.002)


def test_stored_bytes_replace_the_count_and_parts_of_files_are_refused() -> None:
    plain = shape.parse(BASE)
    assert shape.with_stored_bytes(plain, 123_456_789).weight_bytes == 123_456_789
    with pytest.raises(ShapeError, match="headers of a part"):
        shape.with_stored_bytes(plain, 10)


def test_a_config_nested_without_end_ended_in_a_traceback() -> None:
    text = b'{"config": {"a": ' + b"[" * 3000 + b"]" * 3000 + b"}}"
    with pytest.raises(ShapeError, match=r"config.json cannot be read"):
        stored.decoded(text, "config.json")
    with pytest.raises(ShapeError, match="nothing that can be read"):
        inspection.read(text)


@pytest.mark.parametrize("named", [[["a"]], ["model.safetensors", 5]])
def test_an_index_that_names_no_files_ended_in_a_traceback(named: list[object]) -> None:
    with pytest.raises(ShapeError, match="weight_map"):
        stored.weight_files(["model.safetensors"], {"weight_map": dict(enumerate(named))})


def test_header_bytes_add_up_tensors_and_skip_metadata() -> None:
    header = {"__metadata__": {"format": "pt"}, "a": {"data_offsets": [0, 100]}, "b": {"data_offsets": [100, 150]}}
    assert stored.tensor_bytes([header, {"c": {"data_offsets": [0, 7]}}]) == 157


def test_kv_heads_are_copied_when_there_are_more_ranks() -> None:
    """Qwen3-30B has 4 KV heads: on 8 ranks each is there twice."""
    model = catalogue.model("qwen3-30b-a3b")
    split = Parallel(tensor=8)
    assert kv.layout(model, KvDtype.AUTO, 16, split).block_bytes == 16 * 98_304 // 4
    assert kv.bytes_per_token(model, KvDtype.AUTO, split) == 2 * 98_304


def test_mla_is_whole_on_every_rank_and_once_on_the_host() -> None:
    """kaito #2139: divided by ranks, the plan was 8 times too large and pods crashed."""
    model = catalogue.model("deepseek-v3")
    split = Parallel(tensor=8)
    assert kv.layout(model, KvDtype.AUTO, 16, split) == kv.layout(model)
    assert kv.bytes_per_token(model, KvDtype.AUTO, split) == 8 * 70_272
    assert parallel.stored_copies(model, split) == 1


def test_pipeline_stages_hold_whole_layers() -> None:
    model = shape.parse({**BASE, "num_hidden_layers": 13})
    split = Parallel(pipeline=2)
    assert kv.layout(model, KvDtype.AUTO, 16, split).block_bytes == 7 * kv.layout(model).page_bytes
    assert 2 * parallel.rank_weight_bytes(model, split) >= model.weight_bytes


@pytest.mark.parametrize(
    ("name", "split", "words"),
    [
        ("llama-3.1-8b", Parallel(tensor=3), "32 attention heads"),
        ("phi-4", Parallel(tensor=4), "10 KV heads"),
        ("llama-3.1-8b", Parallel(pipeline=33), "32 layers"),
        ("llama-3.1-8b", Parallel(tensor=0), "at least 1"),
    ],
)
def test_splits_that_the_engine_refuses_are_refused_with_the_reason(name: str, split: Parallel, words: str) -> None:
    with pytest.raises(SizingError, match=words):
        parallel.check(catalogue.model(name), split)


def test_the_catalogue_takes_names_as_people_write_them() -> None:
    assert catalogue.model("meta-llama/Llama-3.1-8B-Instruct") == catalogue.model("llama-3.1-8b")
    assert catalogue.accelerator("H100").name == "h100"
    with pytest.raises(SizingError, match=r"it has smollm2-135m, llama-3\.2-1b"):
        catalogue.model("gpt-9")
    with pytest.raises(SizingError, match="it has a10g, l4"):
        catalogue.accelerator("abacus")


def test_every_layer_of_every_model_in_the_catalogue_is_accounted_for() -> None:
    for name in catalogue.CONFIGS:
        model = catalogue.model(name)
        assert sum(layers.count for layers in model.kv) == model.layers
        assert sum(group.layers for group in kv.layout(model).groups) == model.layers
        assert LayerKind.STATE in {layers.kind for layers in model.kv} or kv.layout(model).block_tokens == 16


@pytest.mark.parametrize(
    ("more", "longest", "unasked"),
    [
        ({}, 16384, 16384),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 65536, 65536),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, 32768, 32768),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 1e305}}, 1 << 31, 1 << 31),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": -1}}, 16384, 16384),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16384}}, 16384, 16384),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 16384, 16384),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8}}}, 131072, 131072),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "model_type": "gemma3_text"}, 16384, 16384),
        (
            {"rope_scaling": {"type": "longrope", "long_factor": [1.0]}, "original_max_position_embeddings": 4096},
            16384,
            4096,
        ),
        ({"original_max_position_embeddings": 4096}, 16384, 16384),
    ],
)
def test_the_longest_sequence_is_the_engines(more: dict[str, Any], longest: int, unasked: int) -> None:
    """A plan for shorter ones than the engine takes says that it fits, and the engine does not start."""
    config = {**BASE, "max_position_embeddings": 16384, **more}
    for found in (shape.parse(config), shape.parse(needed(config))):
        assert (found.max_model_len, found.unasked_len) == (longest, unasked)


def test_a_plan_is_for_what_the_engine_takes_unasked_and_more_may_be_asked_for() -> None:
    more = {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096}
    found = shape.parse({**BASE, "max_position_embeddings": 16384, **more})
    device = catalogue.accelerator("l4")
    assert plan(SizingRequest(shape=found, accelerator=device)).max_model_len == 4096
    assert plan(SizingRequest(shape=found, accelerator=device, max_model_len=16384)).max_model_len == 16384


def test_weights_that_are_stored_in_32_bits_are_loaded_in_16() -> None:
    """Else a model that is stored so is refused on devices that it fits on: the engine casts it."""
    stored, cast = (shape.parse({**BASE, "torch_dtype": dtype}) for dtype in ("float32", "bfloat16"))
    assert stored.weight_bytes == 2 * cast.weight_bytes
    for split in (Parallel(), Parallel(tensor=2), Parallel(tensor=2, pipeline=2)):
        assert abs(parallel.rank_weight_bytes(stored, split) - parallel.rank_weight_bytes(cast, split)) < 8
