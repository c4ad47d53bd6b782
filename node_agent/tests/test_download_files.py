"""Which files of a repository an engine needs, and how many of their bytes are there."""

from __future__ import annotations

import pytest

from prefixpool_agent.download.files import File, Listing, done_bytes, needed

SMALL = (
    "config.json",
    "tokenizer.json",
    "tokenizer.model",
    "chat_template.jinja",
    "modeling_own.py",
    "1_Pooling/config.json",
)
INDEX = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}


def listing(*names: str) -> Listing:
    return Listing("c", tuple(File(name, len(name), f"blob-{name}") for name in names))


def names(found: Listing) -> set[str]:
    return {file.name for file in found.files}


@pytest.mark.parametrize(
    ("weights", "other"),
    [
        (("model.safetensors",), ("pytorch_model.bin", "model.onnx", "consolidated.safetensors", "original/x.pth")),
        (("pytorch_model-1.bin", "pytorch_model-2.bin"), ("tf_model.h5", "flax_model.msgpack", "rust_model.ot")),
        (("consolidated.safetensors",), ("consolidated.00.pth",)),
    ],
)
def test_weights_come_in_one_format_and_all_that_is_not_weights_comes_along(
    weights: tuple[str, ...], other: tuple[str, ...]
) -> None:
    found = needed(listing(*other, *weights, *SMALL, "README.md", ".gitattributes"), None)
    assert names(found) == {*weights, *SMALL}


def test_the_index_says_which_weights() -> None:
    found = needed(listing("model-1.safetensors", "model-2.safetensors", "model.fp32.safetensors", "config.json"), INDEX)
    assert names(found) == {"model-1.safetensors", "model-2.safetensors", "config.json"}


def test_weights_come_last_and_the_largest_of_them_first() -> None:
    """So that what is whole is known to be so by its weights, and no small file is waited for at the end."""
    found = needed(listing("model-1.safetensors", "model-200.safetensors", "config.json"), None)
    assert [file.name for file in found.files] == ["config.json", "model-200.safetensors", "model-1.safetensors"]


def test_without_weights_nothing_is_needed() -> None:
    assert needed(listing("model.gguf", "config.json"), None).files == ()


def test_bytes_that_are_there_count_up_to_the_size_of_their_file() -> None:
    """What a killed download left may be longer than what another one has, but not longer than the file."""
    found = Listing("c", (File("a", 100, "x"), File("b", 50, "y"), File("c", 7, "z")))
    assert found.total_bytes == 157
    assert done_bytes(found, {"x": 30, "y": 80, "other": 1000}) == 80
