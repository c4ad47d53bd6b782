"""Whose chunks those in a directory are."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixpool_agent.tiers.connector import adapters
from prefixpool_agent.tiers.identity import namespace


def adapter(folder: Path, weights: bytes, config: bytes = b"{}") -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "adapter_config.json").write_bytes(config)
    return str(folder)


def test_chunks_of_an_adapter_that_was_trained_anew_in_its_place_were_restored(tmp_path: Path) -> None:
    path = adapter(tmp_path / "sql", b"first")
    first = namespace("model", {}, [path])
    assert namespace("model", {}, [path]) == first
    adapter(tmp_path / "sql", b"other")
    second = namespace("model", {}, [path])
    adapter(tmp_path / "sql", b"other", b'{"lora_alpha": 2}')
    assert len({first, second, namespace("model", {}, [path])}) == 3


def test_adapters_on_the_hub_and_none_change_no_name() -> None:
    assert namespace("model", {}, ["org/adapter"]) == namespace("model", {})


@pytest.mark.parametrize(
    ("engine_args", "paths"),
    [
        (["--enable-lora", "--lora-modules", "sql=/a/sql", "law=/a/law", "--max-loras", "2"], ("/a/sql", "/a/law")),
        (["--lora_modules", '{"name": "sql", "path": "/a/sql"}'], ("/a/sql",)),
        (["--lora-modules=sql=/a/sql"], ("/a/sql",)),
        (["--max-loras", "2"], ()),
        (["--lora-modules", "", "nonsense"], ()),
    ],
)
def test_adapters_are_found_as_the_engine_takes_them(engine_args: list[str], paths: tuple[str, ...]) -> None:
    assert adapters(engine_args) == paths
