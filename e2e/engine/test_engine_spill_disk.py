"""Disk below host memory, on real vLLM: what is restored is what was computed, by this engine, another, or one that died.

Two engines share a directory, as two replicas of a pool. Like is compared with like: see test_engine_spill_host.py.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from prefixpool_agent.tiers.chunk_file import HEAD_BYTES, Head, decode, encode
from prefixpool_testing.engine_contract import TierContract
from prefixpool_testing.spill_engine import BLOCK, CHUNK_BYTES, SpillEngine, side_by_side, spill_engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT = 10 * BLOCK + 1
CHUNKS = PROMPT // BLOCK


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def engines(model: str, folder: Path) -> Iterator[list[SpillEngine]]:
    """Two replicas with one directory."""
    options = ("--host-kv-bytes", str(120 * CHUNK_BYTES), "--disk-kv-dir", str(folder), "--disk-kv-bytes", str(4 << 30))
    shared = (*options, "--disk-kv-shared", "true", "--disk-kv-deadline-s", "1.0")
    with side_by_side(*(spill_engine(model, *shared) for _ in range(2))) as both:
        yield both


def chunks_of(folder: Path) -> set[Path]:
    return set(folder.rglob("*.kv"))


class Kept:
    """A prompt that one engine has read and written to disk; `files`: its chunks."""

    def __init__(self, engine: SpillEngine, folder: Path, seed: str) -> None:
        before, written = chunks_of(folder), engine.disk_events("written")
        self.prompt = engine.prompt(seed, PROMPT)
        self.cold, self.device = engine.say(self.prompt), engine.say(self.prompt)
        engine.written(written + CHUNKS)
        self.files = sorted(chunks_of(folder) - before)
        assert (self.cold.cached, self.device.cached) == (0, PROMPT - 1)
        assert len(self.files) >= CHUNKS


def test_restore_from_disk_is_bit_for_bit_a_device_hit(engines: list[SpillEngine], folder: Path) -> None:
    one, _ = engines
    for seed in ("one", "two"):
        kept = Kept(one, folder, seed)
        before = one.cached_from("disk")
        one.reset(host=True)
        disk = one.say(kept.prompt)
        assert (disk.ids, disk.logprobs, disk.cached) == (kept.device.ids, kept.device.logprobs, PROMPT - 1)
        assert one.cached_from("disk") == before + PROMPT - 1
        assert disk.agrees(kept.cold)


def test_what_one_replica_read_another_restores(engines: list[SpillEngine], folder: Path) -> None:
    one, two = engines
    kept = Kept(one, folder, "shared")
    before = two.cached_from("disk")
    other = two.say(kept.prompt)
    assert (other.ids, other.logprobs, other.cached) == (kept.device.ids, kept.device.logprobs, PROMPT - 1)
    assert two.cached_from("disk") == before + PROMPT - 1


def test_file_with_other_bytes_changes_the_answer(engines: list[SpillEngine], folder: Path) -> None:
    """The control: the comparison depends on what is on disk."""
    one, two = engines
    kept = Kept(one, folder, "control")
    for path in kept.files:
        data = path.read_bytes()
        head, payload = decode(data), data[HEAD_BYTES:]
        wrong = payload[CHUNK_BYTES // 2 :] + payload[: CHUNK_BYTES // 2]
        path.write_bytes(encode(Head(*head), wrong) + wrong)
    other = two.say(kept.prompt)
    assert other.cached == PROMPT - 1
    assert other.logprobs != kept.device.logprobs


def test_another_tenant_finds_nothing_on_disk__peers_63(engines: list[SpillEngine], folder: Path) -> None:
    one, two = engines
    prompt, written = one.prompt("salted", PROMPT), one.disk_events("written")
    first = one.say(prompt, cache_salt="alpha")
    one.written(written + CHUNKS)
    assert two.say(prompt, cache_salt="beta").cached == 0
    again = two.say(prompt, cache_salt="alpha")
    assert again.cached == PROMPT - 1
    assert again.agrees(first)


def test_flipped_bits_are_a_miss_and_counted(engines: list[SpillEngine], folder: Path) -> None:
    one, two = engines
    kept, before = Kept(one, folder, "flipped"), two.disk_events("read_corrupt")
    for path in kept.files[1:]:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 16
        path.write_bytes(data)
    other = two.say(kept.prompt)
    assert other.cached <= BLOCK
    assert other.agrees(kept.cold)
    assert two.say(kept.prompt).cached == PROMPT - 1, "computed, and kept on the device"
    assert two.disk_events("read_corrupt") > before


def test_files_cut_short_or_gone_are_a_miss(engines: list[SpillEngine], folder: Path) -> None:
    one, two = engines
    kept = Kept(one, folder, "cut")
    for i, path in enumerate(kept.files):
        if i % 2:
            path.unlink()
        else:
            os.truncate(path, i * 1000)
    other = two.say(kept.prompt)
    assert other.cached == 0
    assert other.agrees(kept.cold)


def test_disk_that_hangs_holds_no_request_up__peers_62(engines: list[SpillEngine], folder: Path) -> None:
    one, _ = engines
    kept, before = Kept(one, folder, "hangs"), one.disk_events("read_late")
    one.reset(host=True)
    for path in kept.files:
        path.unlink()
        os.mkfifo(path)  # opening it waits for ever
    other = one.say(kept.prompt)
    assert other.cached == 0
    assert other.agrees(kept.cold)
    assert one.say(one.prompt("meanwhile", PROMPT)).cached == 0
    assert one.disk_events("read_late") > before
    for path in kept.files:  # let the readers go
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
        path.unlink(missing_ok=True)  # one that was let go finds no chunk in it, and may remove it first


def test_many_at_once_under_pressure_are_right(engines: list[SpillEngine], folder: Path) -> None:
    """Four prompts at a time, together more than device and host memory hold."""
    one, _ = engines
    kept = [Kept(one, folder, f"many {i}") for i in range(8)]
    one.reset(host=True)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            again = list(pool.map(lambda each: one.say(each.prompt), kept))
            assert all(reply.agrees(each.cold) for reply, each in zip(again, kept, strict=True))
    assert one.cached_from("disk") > 0


def test_preempted_requests_are_restored_from_disk_and_answered_right__peers_55(
    engines: list[SpillEngine],
) -> None:
    """Four at once get all blocks of the device, and need more at their thirty-second token."""
    one, _ = engines
    prompts = [one.prompt(f"preempted {i}", 23 * BLOCK + 1) for i in range(4)]
    written = one.disk_events("written")
    alone = [one.say(prompt, tokens=64) for prompt in prompts]
    one.written(written + 4 * 23)
    one.reset(host=True)
    restored, preempted = one.cached_from("disk"), one.preemptions()
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda prompt: one.say(prompt, tokens=64), prompts))
    assert one.preemptions() > preempted
    assert one.cached_from("disk") > restored
    assert all(reply.agrees(other) for reply, other in zip(together, alone, strict=True))


def test_deleted_directory_is_an_empty_tier(engines: list[SpillEngine], folder: Path) -> None:
    one, _ = engines
    kept = Kept(one, folder, "deleted")
    shutil.rmtree(folder)
    one.reset(host=True)
    again = one.say(kept.prompt)
    assert again.cached == 0
    assert again.agrees(kept.cold)


@pytest.fixture(scope="module")
def tiered_engine(engines: list[SpillEngine], folder: Path) -> SpillEngine:
    _, two = engines
    two.say([1] * 40)
    folder.mkdir(exist_ok=True)  # it was deleted by a test
    two.until_disk_takes_writes()
    two.worker.until(lambda state: state["engine"]["shm"])  # else there was nothing to be left behind by a dead one
    return two


class TestVllmTiers(TierContract):
    """The sim keeps the same: e2e/behaviour/test_behaviour_engine_contract.py."""
