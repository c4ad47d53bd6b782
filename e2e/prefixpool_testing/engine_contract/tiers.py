"""Tiers below the device: what left the device comes back from there, bit for bit, and outlives the engine on disk. What a
router tells an engine of loading is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefixpool.policy.loading import NO_DISK, NO_LOAD
from prefixpool_testing.engine_contract.asks import BLOCK
from prefixpool_testing.engine_worker import listening

if TYPE_CHECKING:  # it asks by our `asks`
    from prefixpool_testing.spill_engine import Said, SpillEngine

PROMPT = 10 * BLOCK + 1
CHUNKS = PROMPT // BLOCK
HEAD = 4 * BLOCK


class TierContract:
    """Of one engine with host memory and disk: the fixture `tiered_engine`."""

    def test_prefix_that_left_the_device_is_restored_from_host_memory(self, tiered_engine: SpillEngine) -> None:
        prompt, device = kept(tiered_engine, "left the device")
        before = tiered_engine.cached_from("host")
        tiered_engine.reset()
        assert tiered_engine.say(prompt) == device
        assert tiered_engine.cached_from("host") == before + PROMPT - 1

    def test_prefix_that_left_host_memory_is_restored_from_disk(self, tiered_engine: SpillEngine) -> None:
        prompt, device = kept(tiered_engine, "left host memory")
        before = tiered_engine.cached_from("disk")
        tiered_engine.reset(host=True)
        assert tiered_engine.say(prompt) == device
        assert tiered_engine.cached_from("disk") == before + PROMPT - 1
        tiered_engine.reset()
        assert tiered_engine.say(prompt) == device
        assert tiered_engine.cached_from("disk") == before + PROMPT - 1, "it is in host memory again"

    def test_tiers_tell_what_they_hold_by_the_hashes_of_the_device(self, tiered_engine: SpillEngine) -> None:
        with listening(tiered_engine.worker.run_dir) as events:
            tokens = tiered_engine.prompt("told by each tier", PROMPT)
            tiered_engine.say(tokens)

            def hashes(seen: list[dict[str, object]], medium: str) -> list[object]:
                stored = [event for event in seen if event["type"] == "BlockStored" and event.get("medium") == medium]
                return [hash_ for event in stored for hash_ in event["block_hashes"]]  # type: ignore[attr-defined]

            def all_told(seen: list[dict[str, object]]) -> bool:
                tiered_engine.say([1] * 4, tokens=1)  # events leave with a step of the engine
                device = set(hashes(seen, "GPU")[:CHUNKS])
                return len(device) == CHUNKS and all(device <= set(hashes(seen, tier)) for tier in ("CPU", "STORAGE"))

            assert events.wait(all_told)

    def test_nothing_is_loaded_if_so_told(self, tiered_engine: SpillEngine) -> None:
        prompt, device = kept(tiered_engine, "nothing is loaded")
        assert tiered_engine.say(prompt, kv_transfer_params=NO_LOAD) == device, "what is on the device needs no loading"
        tiered_engine.reset()
        told = tiered_engine.say(prompt, kv_transfer_params=NO_LOAD)
        assert (told.cached, told.agrees(device)) == (0, True)
        tiered_engine.reset()
        assert tiered_engine.say(prompt) == device, "it was there all the time"

    def test_only_so_much_is_loaded_as_told(self, tiered_engine: SpillEngine) -> None:
        prompt, device = kept(tiered_engine, "so much is loaded")
        tiered_engine.reset()
        told = tiered_engine.say(prompt, kv_transfer_params={"max_load_tokens": HEAD + BLOCK - 1})
        assert (told.cached, told.agrees(device)) == (HEAD, True)

    def test_host_memory_is_read_and_the_disk_is_not_if_so_told(self, tiered_engine: SpillEngine) -> None:
        prompt, device = kept(tiered_engine, "no disk")
        tiered_engine.reset(host=True)
        assert tiered_engine.say([*prompt[:HEAD], 1]).cached == HEAD
        tiered_engine.reset()
        read = tiered_engine.disk_events("read")
        told = tiered_engine.say(prompt, kv_transfer_params=NO_DISK)
        assert (told.cached, told.agrees(device)) == (HEAD, True), "the head had come up through host memory"
        assert tiered_engine.disk_events("read") == read
        tiered_engine.reset(host=True)
        assert tiered_engine.say(prompt) == device, "it was there all the time"

    def test_prefix_is_restored_from_disk_after_the_engine_was_killed(self, tiered_engine: SpillEngine) -> None:
        prompt, device = kept(tiered_engine, "outlives the engine")
        tiered_engine.worker.kill_engine()
        assert tiered_engine.say(prompt) == device
        assert tiered_engine.cached_from("disk") == PROMPT - 1


def kept(engine: SpillEngine, name: str) -> tuple[list[int], Said]:
    """A prompt that is on disk, and the answer with all of it found on the device."""
    prompt, written = engine.prompt(name, PROMPT), engine.disk_events("written")
    cold, device = engine.say(prompt), engine.say(prompt)
    assert (cold.cached, device.cached) == (0, PROMPT - 1)
    engine.written(written + CHUNKS)
    return prompt, device
