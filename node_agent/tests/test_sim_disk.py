"""The sim's disk tier: what is restored is what was computed, by this sim, its predecessor, or another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from prefixpool.errors import SettingsError
from prefixpool_agent.engines.metrics import parse_load
from prefixpool_agent.engines.sim import KV_TOKEN_BYTES
from prefixpool_agent.sim.disk import DiskConfig, DiskTier
from prefixpool_agent.sim.metrics import SimMetrics
from prefixpool_agent.sim.settings import SimSettings
from prefixpool_agent.sim.timing import StepShape, TimingModel
from prefixpool_agent.tiers.disk_ledger import Failure, Removal
from prefixpool_testing.stepped_sim import SIZE, Engine, prompt, reply, sequence

Open = Callable[..., DiskTier]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def open_tier(folder: Path) -> Iterator[Open]:
    tiers: list[DiskTier] = []

    def make(*, blocks: int = 1000, shared: bool = False, model: str = "m", free_bytes: int = 0) -> DiskTier:
        tiers.append(DiskTier(DiskConfig(folder, blocks, free_bytes, shared), model, SIZE))
        tiers[-1].open()
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


def small(disk: DiskTier) -> Engine:
    """A device and a host tier that one flush empties."""
    return Engine(disk, blocks=12, host_blocks=11, max_model_len=44)


def flush(engine: Engine) -> None:
    engine.run(sequence(prompt(99, 43)), sequence(prompt(98, 43)))


def test_prefix_that_left_device_and_host_comes_back_from_disk_with_the_same_answer(open_tier: Open) -> None:
    engine = small(open_tier())
    engine.run(first := sequence(prompt(1, 33), 5))
    flush(engine)
    steps = engine.run(again := sequence(prompt(1, 33), 5))
    assert (again.cached, again.cached_host, again.cached_disk) == (32, 0, 32)
    assert (sum(step.restored_tokens for step in steps), sum(step.read_tokens for step in steps)) == (32, 32)
    assert reply(again) == reply(first)


def test_what_came_from_disk_is_in_host_memory_too(open_tier: Open) -> None:
    engine = small(open_tier())
    engine.run(sequence(prompt(1, 33)))
    flush(engine)
    engine.run(sequence(prompt(1, 33)))
    engine.scheduler.reset(external_tiers=False)
    engine.run(again := sequence(prompt(1, 33)))
    assert (again.cached_host, again.cached_disk) == (32, 0)


def test_restarted_sim_and_another_one_restore_what_the_first_computed(open_tier: Open) -> None:
    first = sequence(prompt(1, 33), 5)
    small(open_tier(shared=True)).run(first)
    other = sequence(prompt(1, 33), 5)
    small(open_tier(shared=True)).run(other)
    assert other.cached_disk == 32
    assert reply(other) == reply(first)


def test_what_another_sim_wrote_since_the_start_is_found_in_a_shared_folder(open_tier: Open) -> None:
    one, two = small(open_tier(shared=True)), small(open_tier(shared=True))
    one.run(sequence(prompt(1, 33)))
    two.run(found := sequence(prompt(1, 33)))
    assert found.cached_disk == 32


def test_another_models_blocks_are_not_read(open_tier: Open) -> None:
    small(open_tier()).run(sequence(prompt(1, 33)))
    small(open_tier(model="n")).run(other := sequence(prompt(1, 33)))
    assert other.cached == 0


def test_stores_and_evictions_are_told_as_of_storage(open_tier: Open) -> None:
    disk = open_tier(blocks=6)
    engine = small(disk)
    engine.run(sequence(prompt(1, 17), 2))
    engine.run(sequence(prompt(2, 17), 2))
    engine.run(sequence(prompt(3, 17), 2))
    stored = [hash_ for event in engine.events("BlockStored", "STORAGE") for hash_ in event["block_hashes"]]
    gone = [hash_ for event in engine.events("BlockRemoved", "STORAGE") for hash_ in event["block_hashes"]]
    assert stored[:4] == [hash_ for event in engine.events("BlockStored", "CPU")[:4] for hash_ in event["block_hashes"]]
    assert len(disk) <= 6
    assert len(set(stored) - set(gone)) == len(disk)
    assert disk.used_blocks == len(disk)
    assert disk.counts[f"evicted_{Removal.CAPACITY}"] == len(gone)


def test_damaged_file_is_a_miss_and_counted(open_tier: Open, folder: Path) -> None:
    disk = open_tier()
    engine = small(disk)
    engine.run(first := sequence(prompt(1, 33), 5))
    for path in folder.rglob("*.kv"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    flush(engine)
    engine.run(again := sequence(prompt(1, 33), 5))
    assert again.cached == 0
    assert disk.counts[f"read_{Failure.CORRUPT}"] == 1, "the first block; those behind it are not asked for"
    assert reply(again) == reply(first)


def test_folder_that_cannot_be_used_holds_nothing_and_stops_nobody(open_tier: Open, folder: Path) -> None:
    folder.write_text("a file")
    disk = open_tier()
    small(disk).run(alone := sequence(prompt(1, 33), 5))
    assert alone.finish == "length"
    assert len(disk) == 0
    assert any(event.startswith("write_") for event in disk.counts)


def test_too_little_free_space_means_no_blocks_on_disk(open_tier: Open) -> None:
    disk = open_tier(free_bytes=1 << 60)
    small(disk).run(sequence(prompt(1, 33)))
    assert len(disk) == 0
    assert disk.counts[f"write_{Failure.DISK_FULL}"] == 1, "behind a failure it rests"


def test_reading_from_disk_takes_longer_than_from_host_memory() -> None:
    timing = TimingModel()
    host, disk = (timing.load_s(StepShape(0, 0, (), restored_tokens=4096, read_tokens=read)) for read in (0, 4096))
    assert host[1] == 0
    assert sum(disk) > 2 * sum(host)
    assert timing.seconds(StepShape(0, 0, (), restored_tokens=9, read_tokens=9)) == timing.step_s + sum(
        timing.load_s(StepShape(0, 0, (), restored_tokens=9, read_tokens=9))
    )


def test_metrics_are_those_of_the_real_tier(open_tier: Open) -> None:
    engine = small(open_tier())
    metrics = SimMetrics(CollectorRegistry(), model="m", block_tokens=SIZE, blocks=12, max_model_len=44)
    loads = metrics.with_tiers(engine.scheduler.below, SIZE)
    engine.run(sequence(prompt(1, 33)))
    flush(engine)
    engine.run(sequence(prompt(1, 33)))
    loads.host_s.inc(0.25)
    loads.disk_s.inc(0.5)
    load = parse_load(generate_latest(metrics.registry).decode())
    assert (load.load_s, load.read_s) == (0.25, 0.5)
    block_bytes = SIZE * KV_TOKEN_BYTES
    assert (load.host.used_bytes, load.host.capacity_bytes) == (11 * block_bytes, 11 * block_bytes)
    assert (load.disk.used_bytes, load.disk.capacity_bytes) == (28 * block_bytes, 1000 * block_bytes)
    assert dict(load.disk.events) == {"written": 28, "read": 8}
    assert dict(load.host.events)["evicted_capacity"] == dict(load.host.events)["written"] - 11


@pytest.mark.parametrize("given", [{"disk_blocks": 5}, {"disk_dir": "/kv"}, {"disk_dir": "/kv", "disk_blocks": 5}])
def test_disk_tier_needs_a_folder_room_and_a_host_tier(given: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match="a disk tier needs --disk-dir, --disk-blocks and --host-blocks"):
        SimSettings(model="m", **given).disk()  # type: ignore[arg-type]  # test data
