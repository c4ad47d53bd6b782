"""The document that an inspection writes: small, and as good as the config.json that it was made from."""

import json
from pathlib import Path
from typing import Any

import pytest

from prefixpool.sizing import inspection, shape
from prefixpool.sizing.catalogue import CONFIGS
from prefixpool.sizing.errors import ShapeError

FIXTURES = json.loads((Path(__file__).parent / "kv_fixtures.json").read_text())
ALL = {**CONFIGS, **{model["name"]: model["config"] for model in FIXTURES["models"]}}
INT4 = {
    "quant_method": "compressed-tensors",
    "ignore": ["lm_head"] * 1000,
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 128}}},
}


@pytest.mark.parametrize("config", ALL.values(), ids=list(ALL))
def test_the_document_gives_the_shape_of_the_whole_config(config: dict[str, Any]) -> None:
    padded = {
        **config,
        "architectures": ["x"],
        "rope_scaling": {"factor": 8.0},
        "id2label": {str(i): "x" * 50 for i in range(99)},
    }
    text = inspection.write(inspection.inspection(padded, 0, "abc"))
    assert len(text) <= inspection.DOCUMENT_MOST
    assert inspection.read(text).shape("m") == shape.parse(config, "m")


def test_bits_of_quantised_weights_survive_and_lists_of_layers_do_not() -> None:
    config = {**CONFIGS["llama-3.1-8b"], "quantization_config": INT4}
    text = inspection.write(inspection.inspection(config, 0, ""))
    assert b"lm_head" not in text
    assert inspection.read(text).shape("m").bits == shape.parse(config).bits


def test_stored_bytes_of_the_files_win_over_the_count() -> None:
    found = inspection.read(inspection.write(inspection.inspection(CONFIGS["llama-3.1-8b"], 9_000_000_000, "")))
    assert found.shape("m").weight_bytes == 9_000_000_000


def test_what_sizing_could_not_use_is_refused_where_the_files_are() -> None:
    with pytest.raises(ShapeError, match="hidden_size"):
        inspection.inspection({"model_type": "llama"}, 0, "")


def test_what_is_too_long_for_a_termination_message_is_refused() -> None:
    config = {**CONFIGS["llama-3.1-8b"], "no_rope_layers": [1] * 3000}
    with pytest.raises(ShapeError, match="more than 4096"):
        inspection.write(inspection.inspection(config, 0, ""))


def test_a_failed_inspection_speaks_for_itself() -> None:
    with pytest.raises(ShapeError, match=r"^the token may not read"):
        inspection.read(inspection.write_error("the token may not read " + "x" * 9999))
    assert len(inspection.write_error("x" * 9999)) <= inspection.DOCUMENT_MOST


@pytest.mark.parametrize("text", ["", "Killed", "{}", '{"config": 5}', "[]", "null"])
def test_what_is_no_document(text: str) -> None:
    with pytest.raises(ShapeError, match="the inspection wrote no"):
        inspection.read(text)
