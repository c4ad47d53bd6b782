"""`prefixpool plan`: models from three sources, comparison of devices, JSON, errors that say what would be right."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from prefixpool_cli import main, plan_view

RUN = CliRunner()
GIB = 1 << 30
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 2048,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def run(*words: str) -> tuple[int, str]:
    found = RUN.invoke(main.app, ["plan", *words], terminal_width=200)
    return found.exit_code, found.output


def plans(*words: str) -> list[dict[str, Any]]:
    code, text = run(*words, "--json")
    assert code == 0, text
    return list(json.loads(text))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def write_tensors(file: Path, size: int) -> None:
    header = json.dumps({"a": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header)


def test_help_teaches_by_example() -> None:
    code, text = run("--help")
    assert code == 0
    assert "prefixpool plan llama-3.1-8b" in text
    assert "warm" in text


def test_a_catalogue_model_on_one_device() -> None:
    code, text = run("llama-3.1-8b", "-a", "h100")
    assert code == 0
    for words in ("8.03 B parameters", "GQA", "131,072 bytes per token", "449,392 tokens", "167 tokens/s", "█"):
        assert words in text


def test_devices_are_compared_side_by_side_and_one_that_fits_is_enough() -> None:
    code, text = run("llama-3.1-8b", "-a", "l4", "-a", "h100")
    assert code == 0
    words = " ".join(text.split())
    assert "does not fit" in words
    assert "12.1 GiB are missing" in words
    assert "a longest sequence of 31,744 tokens" in words


def test_where_it_fits_nowhere_the_exit_code_says_so() -> None:
    assert run("llama-3.1-70b", "-a", "l4")[0] == 1


def test_json_carries_every_figure_and_nothing_else_is_printed() -> None:
    (found,) = plans(
        "deepseek-v3", "-a", "h200", "--tensor-parallel", "8", "--sessions", "500", "--tokens-per-session", "40000",
        "--tier", "host", "--host-gib", "400", "--disk-gib", "1000",
    )  # fmt: skip
    plan = found["plan"]
    assert plan["kvBytesPerToken"] == 562_176
    assert plan["limitedBy"] == "HostKV"
    assert plan["replicas"] == -(-500 // plan["sessionsPerReplica"])
    assert plan["hostPerReplica"]["blocks"] == 400 * GIB // 1_126_400
    assert plan["diskPerReplica"]["blocks"] == 1000 * GIB // 1_126_400
    assert plan["hostNeeds"]["sharedMemory"] > 400 * GIB
    assert [each["tier"] for each in found["breakEven"]] == ["host", "disk"]
    assert found["decodeTokensPerSecond"] > 0


def test_tiers_that_are_too_small_are_warned_of() -> None:
    code, text = run("llama-3.1-8b", "-a", "h100", "--host-gib", "4")
    assert code == 0
    assert "Warning: The host pool of 4.0 GiB is smaller than 2 of the longest prompts (32.0 GiB)" in " ".join(text.split())
    (found,) = plans("llama-3.1-8b", "-a", "h100", "--host-gib", "4")
    assert [warning["hazard"] for warning in found["plan"]["warnings"]] == ["HostPoolSmall"]
    assert "Warning" not in run("llama-3.1-8b", "-a", "h100", "--host-gib", "200")[1]


def test_a_folder_and_its_config_say_the_same(model: Path) -> None:
    by_folder, by_file = plans(str(model)), plans(str(model / "config.json"))
    assert by_folder == by_file
    assert by_folder[0]["model"] == "small"
    assert by_folder[0]["plan"]["kvBytesPerToken"] == 2 * 8 * 4 * 64 * 2


def test_a_replica_on_cpus_has_the_memory_that_it_is_given_and_no_known_speed() -> None:
    (found,) = plans("smollm2-135m", "-a", "cpu:4Gi")
    assert found["plan"]["blockTokens"] == 32
    assert found["plan"]["hostNeeds"]["memory"] == 4 * GIB
    assert found["decodeTokensPerSecond"] is None
    code, text = run("smollm2-135m", "-a", "cpu:4Gi", "-a", "h100")
    assert code == 0
    assert "tokens/s" in text


def test_bytes_for_kv_are_all_that_kv_gets() -> None:
    (found,) = plans("smollm2-135m", "-a", "cpu:5Gi", "--kv-gib", "1")
    assert found["plan"]["devicePerReplica"]["blocks"] == 1456  # logged by a running server, vLLM 0.32 on CPU
    code, text = run("smollm2-135m", "-a", "cpu:4Gi", "--kv-gib", "3")
    assert code == 1
    assert "3.0 GiB of KV are asked for" in text
    fits = "all that is left for KV (now 3.0 GiB are asked for); 8 GiB of memory (now 4.0 GiB)."
    assert f"Any of these alone would fit: {fits}" in " ".join(text.split())
    code, text = run("smollm2-135m", "-a", "cpu:4Gi", "--kv-gib", "0.1")
    assert code == 1
    assert "102 MiB are given to KV" in text


def test_headers_of_weights_are_believed_over_the_count(model: Path) -> None:
    write_tensors(model / "model.safetensors", 5_000_000_000)
    assert plans(str(model))[0]["plan"]["weightsBytes"] == 5_000_000_000


def test_all_files_of_an_index_count_and_a_missing_one_makes_the_count_win(model: Path) -> None:
    counted = plans(str(model))[0]["plan"]["weightsBytes"]
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(zip("ab", names, strict=True))}))
    write_tensors(model / names[0], 1_000_000_000)
    assert plans(str(model))[0]["plan"]["weightsBytes"] == counted
    write_tensors(model / names[1], 2_000_000_000)
    assert plans(str(model))[0]["plan"]["weightsBytes"] == 3_000_000_000


@pytest.mark.parametrize("content", [b"", b"\xff" * 16, struct.pack("<Q", 4) + b"oops"])
def test_broken_weights_are_named(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    code, text = run(str(model))
    assert code == 1
    assert "model.safetensors" in text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["gpt-9"], "no model 'gpt-9' in the catalogue"),
        (["./nowhere"], "./nowhere is not there"),
        (["llama-3.1-8b", "-a", "abacus"], "no accelerator 'abacus'"),
        (["llama-3.1-8b", "-a", "cpu"], "say how much memory a replica may take: cpu:16Gi"),
        (["llama-3.1-8b", "-a", "cpu:lots"], "is not a quantity"),
        (["llama-3.1-8b", "-a", "cpu:x"], 'cpu:x: "x" is not'),  # `:x:` was shown as an emoji
        (["~nobody-of-this-name/model"], "is not there"),  # these three ended in a traceback
        (["x" * 300], "File name too long"),
        (["/proc/self/mem"], "Input/output error"),
        (["llama-3.1-8b", "--tensor-parallel", "3"], "cannot be split over 3 devices"),
        (["llama-3.1-8b", "--sessions", "5"], "needed together"),
        (
            ["llama-3.1-8b", "--sessions", "5", "--tokens-per-session", "5", "--resident-tokens", "5"],
            "either resident tokens",
        ),
        (["llama-3.1-8b", "--resident-tokens", "5", "--tier", "host"], "needs host memory"),
        (["llama-3.1-8b", "--max-model-len", "999999"], "131,072 tokens at most"),
        (["llama-3.1-8b", "--utilisation", "120"], "1 to 100"),
    ],
)
def test_bad_input_is_named_with_what_would_be_right(words: list[str], told: str) -> None:
    code, text = run(*words)
    assert code == 1
    assert told in text
    assert "Traceback" not in text


@pytest.mark.parametrize(("content", "told"), [("{", "cannot be read"), ("[]", "cannot be read"), ("{}", "`hidden_size`")])
def test_a_config_that_is_none(model: Path, content: str, told: str) -> None:
    (model / "config.json").write_text(content)
    code, text = run(str(model))
    assert code == 1
    assert told in text


def test_a_folder_without_config(tmp_path: Path) -> None:
    code, text = run(str(tmp_path))
    assert code == 1
    assert "no config.json" in text


@pytest.mark.parametrize("sizes", [(15, 2, 4, 2), (1, 1, 1, 1), (0, 0, 0, 7), (131, 5, 0, 0), (0, 0, 0, 0)])
def test_the_bar_is_always_as_wide_as_it_should_be(sizes: tuple[int, ...]) -> None:
    widths = plan_view.bar_widths(sizes)
    assert sum(widths) == (plan_view.BAR_WIDTH if sum(sizes) else 0)
    assert all(width >= 0 for width in widths)
