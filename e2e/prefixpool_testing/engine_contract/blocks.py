"""What an engine tells of its blocks: KV events, from which agents know what is cached (research: vllm.md 1)."""

from __future__ import annotations

import pytest
import zmq

from prefixpool import names, note
from prefixpool_testing.engine_contract.asks import (
    APIS,
    BLOCK,
    MODEL,
    Event,
    ask,
    body_of,
    chain,
    exactly,
    labelled,
    quiet,
    reusable,
    stored,
    text,
    tokens_of,
    until_load,
)
from prefixpool_testing.engine_worker import EngineWorker, KvListener
from prefixpool_testing.pool_client import CHAT, COMPLETIONS, Body

REPLAY_END = b"\xff" * 8


class BlockContract:
    """Of one engine with the default hash."""

    @pytest.mark.parametrize("path", APIS)
    def test_stored_blocks_are_a_labelled_chain_of_the_prompts_tokens(
        self, engine_worker: EngineWorker, kv_events: KvListener, path: str
    ) -> None:
        body = body_of(path, text(f"{path} chain"), tokens=1)
        since = len(engine_worker.notes.notes)
        answer = engine_worker.post(path, {**body, "session_id": "evil"}, {"x-session-id": "evil"})
        assert answer.status == 200
        label = engine_worker.notes.exchange(since)[0].id
        prompt = [{"role": "user", "content": body.get("input")}] if "input" in body else body.get("messages")
        tokens = tokens_of(engine_worker, **({"messages": prompt} if prompt else {"prompt": body["prompt"]}))
        found = stored(kv_events, label, len(tokens) // BLOCK - 1)  # the template's first block may have been known
        blocks = chain(found)
        known = len(tokens) // BLOCK - len(blocks.hashes)
        assert (blocks.before is None) == (known == 0)
        assert blocks.tokens == tokens[known * BLOCK : len(tokens) // BLOCK * BLOCK]
        assert len(blocks.tokens) == BLOCK * len(blocks.hashes)

    def test_stored_event_has_the_fields_that_agents_read(self, engine_worker: EngineWorker, kv_events: KvListener) -> None:
        _, label = labelled(engine_worker, COMPLETIONS, body_of(COMPLETIONS, text("fields"), tokens=1))
        for event in stored(kv_events, label, 3):
            assert (event["block_size"], event["medium"], event.get("group_idx", 0)) == (BLOCK, "GPU", 0)
            assert event["lora_name"] is None
            assert all(isinstance(hash_, int) and 0 <= hash_ < 1 << 64 for hash_ in event["block_hashes"])
            assert not any(event.get("extra_keys") or ())

    def test_blocks_of_the_reply_are_told_too(self, engine_worker: EngineWorker, kv_events: KvListener) -> None:
        body = body_of(COMPLETIONS, text("long reply", 30), tokens=70, ignore_eos=True, return_token_ids=True)
        reply, label = labelled(engine_worker, COMPLETIONS, body)
        written = reply.json()["choices"][0]["token_ids"]
        whole = tokens_of(engine_worker, prompt=body["prompt"]) + written
        blocks = reusable(len(whole)) // BLOCK  # the last token was sampled, not computed
        assert chain(stored(kv_events, label, blocks)).tokens == whole[: blocks * BLOCK]

    def test_known_blocks_are_not_told_again_and_new_ones_hang_on_them(
        self, engine_worker: EngineWorker, kv_events: KvListener
    ) -> None:
        tokens = exactly(engine_worker, "goes on", 5 * BLOCK)
        _, label = labelled(engine_worker, COMPLETIONS, page(tokens[: 3 * BLOCK]))
        first = chain(stored(kv_events, label, 3))
        reply, label = labelled(engine_worker, COMPLETIONS, page(tokens))
        second = chain(stored(kv_events, label, 2))
        assert reply.cached == 3 * BLOCK
        assert second.before == first.hashes[-1]
        assert second.tokens == tokens[3 * BLOCK :]

    def test_full_report_tells_known_blocks_too(self, engine_worker: EngineWorker, kv_events: KvListener) -> None:
        body = page(exactly(engine_worker, "reported in full", 4 * BLOCK + 1))
        _, label = labelled(engine_worker, COMPLETIONS, body)
        first = chain(stored(kv_events, label, 4))
        engine_worker.notes.command(note.ReportFull(requests=1))
        label = full_report(engine_worker, body)
        again = stored(kv_events, label, 4)
        assert {hash_ for event in again for hash_ in event["block_hashes"]} == set(first.hashes)

    def test_salt_is_a_cache_of_its_own(self, engine_worker: EngineWorker, kv_events: KvListener) -> None:
        plain = page(exactly(engine_worker, "salted", 3 * BLOCK + 1))
        _, label = labelled(engine_worker, COMPLETIONS, plain)
        known = chain(stored(kv_events, label, 3))
        for salt in ("salt of one", "salt of another"):
            first, label = labelled(engine_worker, COMPLETIONS, {**plain, "cache_salt": salt})
            found = stored(kv_events, label, 3)
            again = ask(engine_worker, COMPLETIONS, {**plain, "cache_salt": salt})
            assert (first.cached, again.cached) == (0, 3 * BLOCK)
            assert chain(found).tokens == known.tokens
            assert not set(chain(found).hashes) & set(known.hashes)
            keys = [key for event in found for key in event["extra_keys"]]
            assert [list(key or ()) for key in keys] == [[salt], [], []], "the salt is told with the first block"

    def test_evicted_blocks_are_told_as_removed(self, engine_worker: EngineWorker, kv_events: KvListener) -> None:
        victim = page(exactly(engine_worker, "evicted", 8 * BLOCK + 1))
        _, label = labelled(engine_worker, COMPLETIONS, victim)
        hashes = set(chain(stored(kv_events, label, 8)).hashes)
        cache = until_load(engine_worker, quiet).cache
        assert cache is not None
        for i in range(2):
            filler = exactly(engine_worker, f"{i} filler", cache.usable_blocks * BLOCK * 5 // 8)
            ask(engine_worker, COMPLETIONS, page(filler))
        gone = kv_events.wait(lambda seen: removed(seen) if hashes <= removed(seen) else None)
        assert hashes <= gone
        assert ask(engine_worker, COMPLETIONS, victim).cached == 0

    def test_reset_empties_the_cache_and_is_told_by_event_and_gate(
        self, engine_worker: EngineWorker, kv_events: KvListener
    ) -> None:
        body = page(exactly(engine_worker, "reset", 2 * BLOCK + 1))
        until_load(engine_worker, quiet)
        _, label = labelled(engine_worker, COMPLETIONS, body)
        stored(kv_events, label, 2)
        assert engine_worker.ask("POST", "/reset_prefix_cache").status == 200
        reset = engine_worker.notes.wait(lambda seen: seen[-1] if isinstance(seen[-1], note.CacheReset) else None)
        assert not reset.external
        again, label = labelled(engine_worker, COMPLETIONS, body)
        assert again.cached == 0
        stored(kv_events, label, 2)
        last = [
            event for event in kv_events.events if event["type"] == "AllBlocksCleared" or event.get("session_id") == label
        ]
        assert last[-2]["type"] == "AllBlocksCleared", "it is told before what is stored next"

    def test_batches_are_numbered_without_a_hole_and_can_be_had_again(
        self, engine_worker: EngineWorker, kv_events: KvListener
    ) -> None:
        _, label = labelled(engine_worker, CHAT, body_of(CHAT, text("numbered"), tokens=1))
        stored(kv_events, label, 3)
        first, last = kv_events.numbers[0], kv_events.numbers[-1]
        assert kv_events.numbers == list(range(first, last + 1))
        assert replayed(engine_worker, 0)[: last + 1] == list(range(last + 1))
        assert replayed(engine_worker, last)[0] == last

    def test_events_leave_by_unix_sockets_only(self, engine_worker: EngineWorker) -> None:
        sources = engine_worker.get("/kv_event_sources").body
        assert b"ipc://" in sources
        assert b"tcp://" not in sources


def page(tokens: list[int]) -> Body:
    """A completion of one token."""
    return {"model": MODEL, "prompt": tokens, "max_tokens": 1, "temperature": 0}


def full_report(worker: EngineWorker, body: Body) -> str:
    """Ask until a request carries the gate's command, which has no acknowledgement. Returns the request's label."""
    for _ in range(20):
        since = len(worker.notes.notes)
        ask(worker, COMPLETIONS, body)
        arrival, _end = worker.notes.exchange(since)
        if arrival.full:
            return arrival.id
    raise AssertionError("no request asked for the full report")


def removed(events: list[Event]) -> set[int]:
    """Hashes of all blocks that were removed."""
    gone = [event for event in events if event["type"] == "BlockRemoved"]
    assert {event["medium"] for event in gone} <= {"GPU"}
    return {hash_ for event in gone for hash_ in event["block_hashes"]}


def replayed(worker: EngineWorker, since: int) -> list[int]:
    """Numbers of the batches that the engine sends again. Raises AssertionError if it does not say that it is done."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"ipc://{worker.run_dir}/{names.RUN_KV_REPLAY}")
        socket.send_multipart([b"", since.to_bytes(8, "big")])
        found: list[int] = []
        while socket.poll(5000):
            *_, number, _payload = socket.recv_multipart()
            if number == REPLAY_END:
                return found
            found.append(int.from_bytes(number, "big"))
        raise AssertionError(f"no end after {len(found)} batches")
