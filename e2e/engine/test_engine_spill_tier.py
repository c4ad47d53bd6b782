"""The disk tier and the order of going inside vLLM's own managers, without a model: vLLM's classes, real shared memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from random import Random
from threading import Event
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from prefixpool_agent.tiers.chunk_file import HEAD_BYTES
from prefixpool_agent.tiers.disk_ledger import Removal

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

ROW = 4096
ROWS = 16
TOKENS = 32
PATIENCE_S = 20.0


class Managers:
    """A host tier of 16 chunks, and a disk below it."""

    def __init__(self, folder: Path, *, shared: bool = False, deadline_s: float = 1.0, capacity: int = 1 << 30) -> None:
        from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
        from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

        from prefixpool_agent.tiers.disk_tier import DiskTier

        region = SharedOffloadRegion(
            engine_id=str(uuid4()), num_chunks=ROWS, rank=None, kv_bytes_per_chunk=ROW, cpu_page_size=ROW
        )
        self.shm = Path(region.mmap_path)
        self.primary = CPUPrimaryTierOffloadingManager(
            ROWS, region, "WorthPolicy", "prefixpool_agent.tiers.worth_policy", enable_events=True
        )
        self.pool = self.primary.get_kv_memoryview().cast("B")
        self.tier = DiskTier(
            offloading_spec=spec(),
            primary_kv_view=self.primary.get_kv_memoryview(),
            tier_type="DiskTier",
            directory=str(folder),
            capacity_bytes=capacity,
            shared=shared,
            free_bytes=0,
            deadline_s=deadline_s,
            setup="",
        )
        self.manager = TieringOffloadingManager(self.primary, [self.tier])
        self.requests = 0
        self.until(self.tier._store.folder.is_dir)  # made by a thread

    def request(self, keys: list[bytes], **params: Any) -> Any:
        from vllm.v1.kv_offload.base import ReqContext

        self.requests += 1
        context = ReqContext(f"r{self.requests}", params or None)
        for i, key in enumerate(keys):
            context.set_offload_key_position(key, TOKENS * (i + 1))
        self.manager.on_new_request(context)
        return context

    def store(self, keys: list[bytes], *, to_disk: bool = True, **params: Any) -> bool:
        """As if a request had computed these."""
        context = self.request(keys, **params)
        output = self.manager.prepare_store(keys, context)
        if output is not None:
            for key, row in zip(output.keys_to_store, output.store_spec.block_ids.tolist(), strict=True):
                self.pool[row * ROW : (row + 1) * ROW] = payload(key)
            self.manager.complete_store(output.keys_to_store, context)
        self.manager.on_request_finished(context)
        if to_disk:
            self.until(lambda: not self.manager.has_pending_work())
        return output is not None

    def load(self, keys: list[bytes]) -> int:
        """As if a request asked for these: how many were there, and right."""
        from vllm.v1.kv_offload.base import LookupResult

        context, found = self.request(keys), 0
        pending = {LookupResult.RETRY, LookupResult.HIT_PENDING}
        for i, key in enumerate(keys):
            self.until(lambda key=key: self.manager.lookup(key, context) not in pending)  # type: ignore[misc]
            if self.manager.lookup(key, context) is not LookupResult.HIT:
                break
            found = i + 1
            (row,) = self.manager.prepare_load([key], context).block_ids.tolist()
            assert bytes(self.pool[row * ROW : (row + 1) * ROW]) == payload(key)
            self.manager.complete_load([key], context)
        self.manager.on_request_finished(context)
        return found

    def step(self) -> None:
        from vllm.v1.kv_offload.base import ScheduleEndContext

        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def until(self, what: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not what():
            assert time.monotonic() < end
            self.step()
            time.sleep(0.002)  # noqa: TID251 - threads, no event loop

    def counts(self) -> dict[str, int]:
        return self.tier._store.counts

    def close(self) -> None:
        self.pool.release()
        self.manager.shutdown()
        self.shm.unlink(missing_ok=True)


def spec() -> Any:
    parallel = SimpleNamespace(tp_size=1, pp_size=1, dcp_size=1, pcp_size=1)
    return SimpleNamespace(
        config=SimpleNamespace(
            model=SimpleNamespace(name="model", dtype="bf16"),
            cache=SimpleNamespace(tokens_per_hash=TOKENS, blocks_per_chunk=1),
            groups=(),
            parallel=parallel,
            worker_kv_bytes_per_block=ROW,
            replicated_layout=False,
            canonical_layout=False,
            kv_cache_layout=None,
        ),
        tokens_per_block=(TOKENS,),
        blocks_per_chunk=1,
    )


def keys(seed: str, count: int) -> list[bytes]:
    return [sha256(f"{seed} {i}".encode()).digest() + bytes(4) for i in range(count)]


def payload(key: bytes) -> bytes:
    return (key * (ROW // len(key) + 1))[:ROW]


Make = Callable[..., Managers]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Managers] = []

    def managers(**options: Any) -> Managers:
        made.append(Managers(tmp_path / "kv", **options))
        return made[-1]

    yield managers
    for one in made:
        one.close()


def test_what_left_host_memory_comes_back_from_disk(make: Make) -> None:
    one = make()
    first = keys("first", 6)
    assert one.store(first)
    for seed in ("second", "third", "fourth"):
        assert one.store(keys(seed, 6))
    assert one.load(first) == 6
    assert one.counts()["written"] == 24
    assert one.counts()["read"] > 0


def test_events_tell_what_came_to_disk(make: Make) -> None:
    from vllm.v1.kv_offload.base import Medium

    one = make()
    first = keys("first", 3)
    one.store(first)
    events = [event for event in one.manager.take_events() if event.medium is Medium.STORAGE]
    assert [key for event in events for key in event.keys] == first
    assert not any(event.removed for event in events)
    one.tier._store._evict(1 << 30, Removal.CAPACITY)
    (gone,) = [event for event in one.manager.take_events() if event.medium is Medium.STORAGE]
    assert (gone.removed, gone.keys) == (True, first[::-1]), "a prefix goes from its end"


def test_after_much_churn_what_was_told_is_what_is_there__peers_12(make: Make, tmp_path: Path) -> None:
    """Through host memory of 16 chunks and a disk of 40; `load` compares bytes."""
    from vllm.v1.kv_offload.base import Medium

    one, draw, found = make(capacity=40 * (ROW + HEAD_BYTES)), Random(1), 0
    told: dict[Medium, set[bytes]] = {Medium.CPU: set(), Medium.STORAGE: set()}
    for _ in range(400):
        prompt = keys(f"prompt {int(draw.paretovariate(0.7)) % 50}", draw.randint(1, 8))
        there = one.load(prompt)
        found += there
        if there < len(prompt):
            one.store(prompt)
        for event in one.manager.take_events():
            held = told[event.medium]
            held.difference_update(event.keys) if event.removed else held.update(event.keys)
    files = list((tmp_path / "kv").rglob("*.kv"))
    assert found > 400
    assert told[Medium.STORAGE] == {bytes.fromhex(path.stem) for path in files}
    assert told[Medium.CPU] == set(one.primary._policy._chunks)
    assert 0 < one.tier._store.used == sum(path.stat().st_size for path in files) <= 40 * (ROW + HEAD_BYTES)


def test_engine_that_starts_finds_what_another_left(make: Make) -> None:
    first = keys("first", 5)
    make().store(first)
    after = make(shared=True)
    assert after.load(first) == 5
    assert after.load(keys("never seen", 3)) == 0


def test_prompt_larger_than_the_host_tier_is_not_kept_and_breaks_nothing(make: Make) -> None:
    one = make()
    assert not one.store(keys("large", ROWS + 1))
    assert one.store(keys("small", 3))
    assert one.load(keys("small", 3)) == 3


def test_disk_that_hangs_is_a_miss_for_everybody(make: Make, tmp_path: Path) -> None:
    one = make(deadline_s=0.2)
    first = keys("first", 5)
    one.store(first)
    one.manager.reset_cache()
    files = list((tmp_path / "kv").rglob("*.kv"))
    for path in files:
        path.unlink()
        os.mkfifo(path)
    assert one.load(first) == 0
    assert one.counts()["read_late"] > 0
    assert one.load(first) == 0, "while all readers hang nothing is promised"
    assert one.store(keys("second", 3))
    for path in files:
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
    one.until(lambda: not one.tier._transfers.stalled)
    one.manager.reset_cache()
    assert one.load(keys("second", 3)) == 3


def test_reset_of_the_cache_while_chunks_were_on_their_way_to_disk_ended_the_engine(make: Make) -> None:
    """Each job was told twice, and vLLM asserts that it knows what it is told."""
    one = make()
    assert one.store(keys("first", 3), to_disk=False)
    assert one.manager.has_pending_work()
    one.manager.reset_cache()
    assert not one.manager.has_pending_work()
    assert one.store(keys("second", 3))
    assert one.load(keys("second", 3)) == 3


def test_shared_disk_that_hangs_at_a_look_delayed_every_request_and_filled_the_memory(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request waits for the deadline; others ask nothing meanwhile, and what nobody waits for is not asked any more."""
    from vllm.v1.kv_offload.base import LookupResult

    one = make(shared=True)
    first, second = keys("first", 50), keys("second", 50)
    looks, answered, exists = [], Event(), one.tier._store.exists

    def hangs(key: bytes) -> bool:
        looks.append(key)
        answered.wait(PATIENCE_S)
        return bool(exists(key))

    monkeypatch.setattr(one.tier._store, "exists", hangs)
    context = one.request(first)
    assert {one.manager.lookup(key, context) for key in first} == {LookupResult.RETRY}
    one.until(lambda: one.manager.lookup(first[0], context) is LookupResult.MISS)
    one.until(lambda: one.tier._overdue(one.tier._looking_since_s))
    context = one.request(second)
    assert {one.manager.lookup(key, context) for key in second} == {LookupResult.MISS}
    answered.set()
    one.until(one.tier._questions.empty)
    assert looks == first[:1]
    assert one.load(keys("third", 1)) == 0
    assert looks == [first[0], *keys("third", 1)]


def test_reserved_prefix_stays_in_host_memory(make: Make) -> None:
    from vllm.v1.kv_offload.base import LookupResult

    one = make()
    promised = keys("promised", 2)
    one.store(promised, tenant="gold", pin_until=time.time() + 60, pin_tokens=2 * TOKENS)
    for i in range(20):
        one.store(keys(f"other {i}", 3))
    context = one.request(promised)
    assert [one.primary.lookup(key, context) for key in promised] == [LookupResult.HIT] * 2


def test_stats_say_what_happened(make: Make) -> None:
    one = make()
    one.store(keys("first", 3))
    stats = one.tier.get_stats().reduce()
    assert stats["prefixpool:disk_events:('written',)"] == 3
    assert stats["prefixpool:disk_chunks"] == 3
    assert one.tier.get_stats().reduce().get("prefixpool:disk_events:('written',)") is None, "since the last time"


def test_host_memory_says_what_it_holds_and_which_promises_were_broken(make: Make) -> None:
    from prefixpool_agent.tiers.host_stats import HostStats

    one = make()
    stats = HostStats(one.manager, one.primary, ROW)
    one.store(keys("promised", 2), tenant="gold", pin_until=time.time() + 60)
    for i in range(8):
        one.store(keys(f"other {i}", 3))
    seen = stats.take().reduce()
    assert seen["prefixpool:host_used_bytes"] == seen["prefixpool:host_capacity_bytes"] == ROWS * ROW
    assert seen["prefixpool:host_events:('evicted_capacity',)"] == 2 + 8 * 3 - ROWS
    assert seen["prefixpool:host_events:('reservation_made',)"] == 2
    assert seen["prefixpool:disk_events:('written',)"] == 2 + 8 * 3, "what others tell is told, too"
    one.manager.reset_cache()
    seen = stats.take().reduce()
    assert seen["prefixpool:host_used_bytes"] == 0
    assert seen["prefixpool:host_events:('reservation_broken',)"] == 2
    assert "prefixpool:host_events:('reservation_made',)" not in seen, "since the last time"
