"""A replica that starts knows at once what text lies on its disk: chunks' heads, and the map of texts beside them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixpool.wire import Tier
from prefixpool_agent.disk_folder import DiskBlock, DiskFolder
from prefixpool_agent.residency.kv_event import block_hash
from prefixpool_agent.tiers.disk_store import DiskStore, Limits
from prefixpool_agent.tiers.trail import Place
from prefixpool_agent.tiers.worth import recompute
from prefixpool_testing.residency_rig import CHAT, SIZE, Rig

MODEL = Path(__file__).parent / "data" / "tiny_model"
SYSTEM = {"role": "system", "content": "You route requests to engines; the prefix of blocks stays where it is cached. " * 3}
QUESTION = {"model": "m", "messages": [SYSTEM, {"role": "user", "content": "What is cached here, and where? Tell me all."}]}


@pytest.fixture
def rig() -> Rig:
    return Rig(MODEL)


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    made = DiskStore(tmp_path, b"m" * 16, Limits(1 << 30, 0, True), recompute)
    made.open()
    return made


def key(i: int, group: int = 0) -> bytes:
    return hashlib.sha256(b"%d" % i).digest() + group.to_bytes(4, "big")


def known(i: int) -> int:
    return block_hash(key(i)[:-4])


def write(store: DiskStore, *numbers: int) -> None:
    for n, i in enumerate(numbers):
        store.write(key(i), Place(key(numbers[n - 1]) if n else b"", SIZE * (n + 1)), b"kv")


def chain(rig: Rig, request: dict[str, Any]) -> list[tuple[int, int | None]]:
    hashes = rig.engine.hashes(rig.render(CHAT, request))
    return list(zip(hashes, [None, *hashes], strict=False))


# -- the folder


def test_look_finds_what_came_and_what_went(store: DiskStore) -> None:
    folder = DiskFolder(store.folder)
    write(store, 1, 2, 3)
    seen = folder.look()
    assert seen.found == [DiskBlock(known(1), None), DiskBlock(known(2), known(1)), DiskBlock(known(3), known(2))]
    assert not folder.look()
    store._path(b"m" * 16 + key(2)).unlink()
    write(store, 1, 2, 3, 4)
    store._path(b"m" * 16 + key(3)).unlink()
    seen = folder.look()
    assert (seen.found, sorted(seen.gone)) == ([DiskBlock(known(4), known(3))], sorted([known(2), known(3)]))


def test_chunks_of_other_kv_groups_and_without_a_place_are_left_out(store: DiskStore) -> None:
    store.write(key(1, group=1), Place(b"", SIZE), b"kv")
    store.write(key(2), Place(b"", 0), b"kv")
    assert not DiskFolder(store.folder).look().found


def test_blocks_that_lie_there_are_known_by_their_names_alone(store: DiskStore) -> None:
    write(store, 1, 2)
    (store.folder / "ab").mkdir()
    (store.folder / "ab" / "no key00000000.kv").write_bytes(b"")
    folder = DiskFolder(store.folder)
    assert folder.lying() == {known(1), known(2)}
    assert folder.known == set()
    folder.look()
    assert folder.known == {known(1), known(2)}


# -- the picture


def test_restarted_replica_knows_what_text_its_disk_holds(rig: Rig) -> None:
    rig.ask(CHAT, QUESTION)
    before = rig.predicted(CHAT, QUESTION)
    assert before > 2 * SIZE
    saved_text, blocks = rig.residency.save(), chain(rig, QUESTION)
    rig.residency, rig.picture = rig.fresh(), {}
    rig.residency.restore(saved_text)
    rig.residency.on_disk(blocks, [])
    rig.flush()
    assert rig.predicted(CHAT, QUESTION) == before
    assert {tier for tier, _ in rig.picture} == {Tier.DISK}
    rig.assert_picture_is_snapshot()


def test_map_may_come_after_the_chunks(rig: Rig) -> None:
    rig.ask(CHAT, QUESTION)
    before, saved_text, blocks = rig.predicted(CHAT, QUESTION), rig.residency.save(), chain(rig, QUESTION)
    rig.residency, rig.picture = rig.fresh(), {}
    rig.residency.on_disk(blocks, [])
    rig.residency.restore(saved_text)
    rig.flush()
    assert rig.predicted(CHAT, QUESTION) == before


def test_texts_of_one_block_that_two_maps_know_add_up(rig: Rig) -> None:
    """The map that was read last hid what the other knew of a shared block, and so all prompts that went on behind it."""
    other = {"model": "m", "messages": [SYSTEM, {"role": "user", "content": "Where does the rest lie? Answer in one word."}]}
    maps, before, blocks = [], [], []
    for request in (QUESTION, other):
        rig.residency, rig.picture = rig.fresh(), {}
        rig.ask(CHAT, request)
        maps.append(rig.residency.save())
        before.append(rig.predicted(CHAT, request))
        blocks += chain(rig, request)
        rig.engine.reset()
    rig.residency, rig.picture = rig.fresh(), {}
    for saved_text in maps:
        rig.residency.restore(saved_text)
    rig.residency.on_disk(blocks, [])
    rig.flush()
    assert [rig.predicted(CHAT, request) for request in (QUESTION, other)] == before


def test_prefix_ends_where_a_chunk_is_missing(rig: Rig) -> None:
    rig.ask(CHAT, QUESTION)
    saved_text, blocks = rig.residency.save(), chain(rig, QUESTION)
    rig.residency, rig.picture = rig.fresh(), {}
    rig.residency.restore(saved_text)
    rig.residency.on_disk([*blocks[:2], *blocks[3:]], [])
    rig.flush()
    assert rig.predicted(CHAT, QUESTION) <= 2 * SIZE
    rig.residency.on_disk([blocks[2]], [])
    rig.residency.on_disk([], [blocks[1][0]])
    rig.flush()
    assert rig.predicted(CHAT, QUESTION) <= SIZE
    rig.assert_picture_is_snapshot()


def test_what_the_engine_restores_moves_to_the_device_and_back(rig: Rig) -> None:
    rig.ask(CHAT, QUESTION)
    before, saved_text, blocks = rig.predicted(CHAT, QUESTION), rig.residency.save(), chain(rig, QUESTION)
    events = list(rig.log)
    rig.residency, rig.picture = rig.fresh(), {}
    rig.residency.restore(saved_text)
    rig.residency.on_disk(blocks, [])
    rig.flush()
    for event in events:  # loaded from disk, the engine tells its blocks as any others
        rig.residency.event(event)
    rig.flush()
    assert {tier for tier, _ in rig.picture} == {Tier.DEVICE}
    rig.residency.cleared(external=False)
    rig.flush()
    assert {tier for tier, _ in rig.picture} == {Tier.DISK}
    assert rig.predicted(CHAT, QUESTION) == before
    rig.residency.cleared(external=True)
    rig.flush()
    assert rig.predicted(CHAT, QUESTION) == before, "a reset leaves the disk alone"


def test_request_on_a_path_without_tokens_is_not_placed_wrongly(rig: Rig) -> None:
    """The engine has told nothing of the first blocks: what is behind them cannot be read as the prompt's beginning."""
    blocks = chain(rig, QUESTION)
    rig.residency.on_disk(blocks[:3], [])
    run = rig.arrive(CHAT, QUESTION)
    rig.pump()
    events = [event for event in rig.log if event["type"] == "BlockStored"]
    rig.residency = rig.fresh()
    rig.residency.on_disk(blocks[:3], [])
    rig.residency.arrival(rig.notes[-1], "2026-01-01")  # type: ignore[arg-type]
    for event in events:
        hashes, tokens = event["block_hashes"][3:], event["token_ids"][3 * SIZE :]
        rig.residency.event({**event, "block_hashes": hashes, "parent_block_hash": blocks[2][0], "token_ids": tokens})
    rig.flush()
    assert run.id
    assert rig.picture == {}
    assert rig.residency.counts["tokens_unknown"] > 0


# -- what is told beside the chunks


def test_only_what_was_learned_here_is_news_and_only_once(rig: Rig) -> None:
    rig.ask(CHAT, QUESTION)
    told = rig.residency.take_news()
    assert {key for _, facts in told for key in facts[::2]} == {key for _, key in rig.picture}
    assert rig.residency.take_news() == []
    other = rig.fresh()
    other.restore(rig.residency.save())
    other.on_disk(chain(rig, QUESTION), [])
    assert other.take_news() == [], "another has told it"


def test_news_outlives_the_engine(rig: Rig) -> None:
    rig.ask(CHAT, QUESTION)
    rig.residency.reset()
    told = rig.residency.take_news()
    assert {key for _, facts in told for key in facts[::2]} == {key for _, key in rig.picture}


def test_what_an_agent_before_this_one_may_not_have_told_is_news(rig: Rig) -> None:
    rig.ask(CHAT, QUESTION)
    other = rig.fresh()
    other.restore(rig.residency.save(), own=True)
    assert sorted(block for block, _ in other.take_news()) == sorted(block for block, _ in rig.residency.take_news())


def test_text_of_a_chunk_that_went_and_came_again_is_told_again(rig: Rig) -> None:
    """Its entry went with the first one."""
    rig.ask(CHAT, QUESTION)
    told = rig.residency.take_news()
    stored = next(event for event in rig.log if event["type"] == "BlockStored")
    rig.residency.event({**stored, "medium": "STORAGE"})
    again = rig.residency.take_news()
    assert again
    assert {block for block, _ in again} == {block for block, _ in told if block in set(stored["block_hashes"])}


# -- a disk that others have, too


def on(rig: Rig, tier: Tier) -> set[int]:
    return {key for each, key in rig.picture if each is tier}


def test_a_shared_disk_is_told_of_whatever_is_nearer(rig: Rig) -> None:
    rig.residency.share_disk(True)
    rig.ask(CHAT, QUESTION)
    device = on(rig, Tier.DEVICE)
    assert device
    assert not on(rig, Tier.DISK)
    blocks = chain(rig, QUESTION)
    rig.residency.on_disk(blocks, [])
    rig.flush()
    assert (on(rig, Tier.DEVICE), on(rig, Tier.DISK)) == (device, device)
    rig.assert_picture_is_snapshot()
    rig.residency.cleared(external=True)
    rig.flush()
    assert (on(rig, Tier.DEVICE), on(rig, Tier.DISK)) == (set(), device)
    rig.assert_picture_is_snapshot()


def test_what_others_could_not_read_from_a_shared_disk_alone_is_not_told(rig: Rig) -> None:
    """The first block is on this replica's device only."""
    rig.residency.share_disk(True)
    rig.ask(CHAT, QUESTION)
    before, blocks = rig.predicted(CHAT, QUESTION), chain(rig, QUESTION)
    rig.residency.on_disk(blocks[1:], [])
    rig.flush()
    assert not on(rig, Tier.DISK)
    rig.residency.on_disk(blocks[:1], [])
    rig.flush()
    assert on(rig, Tier.DISK)
    rig.residency.on_disk([], [blocks[0][0]])
    rig.flush()
    assert not on(rig, Tier.DISK)
    assert rig.predicted(CHAT, QUESTION) == before
    rig.assert_picture_is_snapshot()


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_two_replicas_and_their_disk_through_any_changes(data: st.DataObject) -> None:
    """What is told of a shared disk is what can be read from it alone; the picture by changes is the snapshot."""
    rig = Rig(MODEL)
    blocks = chain(rig, QUESTION)
    lying: set[int] = set()
    rig.ask(CHAT, QUESTION)
    known = {key: tokens for (_, key), tokens in rig.picture.items()}
    shared = False
    for _ in range(data.draw(st.integers(1, 12))):
        step = data.draw(st.sampled_from(["written", "gone", "cleared", "asked", "shared"]))
        some = data.draw(st.lists(st.integers(0, len(blocks) - 1), max_size=6, unique=True).map(sorted))
        if step == "written":
            rig.residency.on_disk([blocks[i] for i in some], [])
            lying |= set(some)
        elif step == "gone":
            rig.residency.on_disk([], [blocks[i][0] for i in some if i in lying])
            lying -= set(some)
        elif step == "cleared":
            rig.engine.reset()
            rig.residency.cleared(external=True)
        elif step == "asked":
            rig.ask(CHAT, QUESTION)
        else:
            shared = data.draw(st.booleans())
            rig.residency.share_disk(shared)
        rig.flush()
        rig.assert_picture_is_snapshot()
        if shared:
            whole = next((i for i in range(len(blocks)) if i not in lying), len(blocks))
            readable = {key for key, tokens in known.items() if max(1, tokens // SIZE) <= whole}
            assert on(rig, Tier.DISK) & known.keys() == readable


def test_a_file_of_somebody_else_hid_all_that_is_on_disk(store: DiskStore) -> None:
    write(store, 1)
    (store.folder / "ok").write_text("not a folder of chunks")
    assert DiskFolder(store.folder).look().found == [DiskBlock(known(1), None)]
