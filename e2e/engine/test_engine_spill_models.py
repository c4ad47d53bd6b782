"""Other models below the device, on real vLLM: sliding windows, adapters, two models in one directory, a small host tier."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixpool_testing.hybrid_model import WINDOW_TOKENS, make_hybrid
from prefixpool_testing.lora_adapter import make_adapter
from prefixpool_testing.spill_engine import BLOCK, CHUNK_BYTES, SpillEngine, side_by_side, spill_engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

PROMPT = 10 * BLOCK + 1
SHORT = 2 * BLOCK + 1
HOST_CHUNKS = 5  # of the engine with adapters: half a prompt


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def engines(model: str, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SpillEngine]]:
    hybrid, made = tmp_path_factory.mktemp("hybrid"), tmp_path_factory.mktemp("adapters")
    make_hybrid(hybrid, Path(model))
    for seed, name in enumerate(("one", "two")):
        make_adapter(made / name, Path(model), seed)
    size = ("--device-blocks", "385", "--host-kv-bytes", str(64 << 20))  # each of four KV groups has blocks of its own
    lora = f"--enable-lora --max-loras 2 --lora-modules one={made / 'one'} two={made / 'two'}"
    host = ("--host-kv-bytes", str(HOST_CHUNKS * CHUNK_BYTES))
    with side_by_side(
        spill_engine(str(hybrid), *size, *disk(folder)),
        spill_engine(model, *host, *disk(folder), f"--engine-args={lora}"),
    ) as both:
        yield both


@pytest.fixture(scope="module")
def windows(engines: list[SpillEngine]) -> SpillEngine:
    """An engine with a model of sliding windows, and the tokenizer of the other model."""
    return engines[0]


@pytest.fixture(scope="module")
def adapters(engines: list[SpillEngine]) -> SpillEngine:
    """An engine with two adapters, and less host memory than a prompt takes."""
    return engines[1]


def disk(folder: Path) -> tuple[str, ...]:
    return "--disk-kv-dir", str(folder), "--disk-kv-bytes", str(4 << 30), "--disk-kv-shared", "true"


def test_sliding_windows_are_restored_bit_for_bit__peers_65(windows: SpillEngine) -> None:
    """A hit needs all of the full layers and the last window of the others."""
    assert PROMPT > 4 * WINDOW_TOKENS
    prompt, from_host, from_disk = (
        windows.prompt("windows", PROMPT),
        windows.cached_from("host"),
        windows.cached_from("disk"),
    )
    cold, device = windows.say(prompt), windows.say(prompt)
    windows.written(PROMPT // BLOCK)
    windows.reset()
    host = windows.say(prompt)
    windows.reset(host=True)
    disk = windows.say(prompt)
    assert windows.cached_from("host") > from_host
    assert windows.cached_from("disk") > from_disk
    assert (cold.cached, device.cached, host.cached, disk.cached) == (0, PROMPT - 1, PROMPT - 1, PROMPT - 1)
    assert (host.ids, host.logprobs) == (device.ids, device.logprobs)
    assert (disk.ids, disk.logprobs) == (device.ids, device.logprobs)
    assert host.agrees(cold)


def test_model_finds_nothing_of_another_in_one_directory(windows: SpillEngine, adapters: SpillEngine, folder: Path) -> None:
    """Both have one tokenizer, so that all their blocks have the same hashes."""
    prompt = windows.prompt("both", SHORT)
    assert prompt == adapters.prompt("both", SHORT)
    written = windows.disk_events("written"), adapters.disk_events("written")
    windows.say(prompt)
    windows.written(written[0] + SHORT // BLOCK)
    first = adapters.say(prompt)
    assert first.cached == 0
    adapters.written(written[1] + SHORT // BLOCK)
    adapters.reset(host=True)
    again = adapters.say(prompt)
    assert again.cached == SHORT - 1, "its own chunks are found"
    assert again.agrees(first)
    assert len([path for path in folder.iterdir() if len(path.name) == 32]) == 2, "a folder for each"


def test_another_adapter_finds_nothing_in_any_tier__peers_63(adapters: SpillEngine) -> None:
    prompt, written = adapters.prompt("adapters", SHORT), adapters.disk_events("written")
    first = adapters.say(prompt, model="one")
    assert adapters.say(prompt, model="two").cached == 0, "on the device"
    assert adapters.say(prompt).cached == 0, "without an adapter"
    adapters.written(written + 3 * (SHORT // BLOCK))
    adapters.reset()
    prompt_two = adapters.prompt("adapters, too", SHORT)
    written = adapters.disk_events("written")
    adapters.say(prompt_two, model="one")
    adapters.reset()
    assert adapters.say(prompt_two, model="two").cached == 0, "in host memory"
    adapters.written(written + 2 * (SHORT // BLOCK))
    adapters.reset(host=True)
    assert adapters.say(prompt_two).cached == 0, "on disk"
    again = adapters.say(prompt, model="one")
    assert again.cached == SHORT - 1, "its own chunks are found"
    assert again.agrees(first)
    assert again.ids != adapters.say(prompt, model="two").ids


def test_prompt_that_host_memory_has_no_room_for_is_answered_all_the_same(adapters: SpillEngine) -> None:
    prompt = adapters.prompt("more than there is room for", PROMPT)
    cold, device = adapters.say(prompt), adapters.say(prompt)
    adapters.reset()
    again = adapters.say(prompt)
    assert (cold.cached, device.cached) == (0, PROMPT - 1)
    assert again.cached <= HOST_CHUNKS * BLOCK
    assert again.agrees(cold)
    small = adapters.prompt("there is room for this", SHORT)
    adapters.say(small)
    adapters.reset()
    assert adapters.say(small).cached == SHORT - 1
