"""Gate, supervisor and vLLM adapter with a real vLLM."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from prefixpool import note
from prefixpool_agent.engines.metrics import CacheConfig, parse_load
from prefixpool_agent.engines.progress import progress
from prefixpool_agent.gate_state import GateState
from prefixpool_testing.engine_worker import KEY, OPTIONS, Answer, EngineWorker, KvListener

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PATHS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/tokenize",
    "/metrics",
    "/health",
    "/kv_event_sources",
    "/docs",
    "/v1/models",
]


@pytest.fixture
def events(engine_worker: EngineWorker) -> Iterator[KvListener]:
    listener = KvListener(engine_worker.run_dir)
    time.sleep(0.2)  # noqa: TID251 - a subscription has no acknowledgement
    yield listener
    listener.close()


def chat(engine_worker: EngineWorker, text: str, *, max_tokens: int = 4, **more: Any) -> Answer:
    body = {"model": name(engine_worker), "messages": [{"role": "user", "content": text}], "temperature": 0}
    return engine_worker.post("/v1/chat/completions", {**body, "max_tokens": max_tokens, **more})


def name(engine_worker: EngineWorker) -> str:
    return str(engine_worker.get("/v1/models").json()["data"][0]["id"])


def story(seed: str) -> str:
    return " ".join(f"{seed} {n} went up the hill." for n in range(40))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("key", [None, "wrong"])
def test_no_path_is_open_without_the_key(engine_worker: EngineWorker, path: str, key: str | None) -> None:
    for method in ("GET", "POST"):
        assert engine_worker.ask(method, path, b"{}", key=key).status == 401


def test_requests_are_noted_and_kv_events_carry_our_label(engine_worker: EngineWorker, events: KvListener) -> None:
    since = len(engine_worker.notes.notes)
    body = {"model": name(engine_worker), "messages": [{"role": "user", "content": story("Ann")}], "max_tokens": 4}
    answer = engine_worker.post("/v1/chat/completions", {**body, "session_id": "evil"}, {"x-session-id": "evil"})
    assert answer.status == 200
    arrival, end = engine_worker.notes.exchange(since)
    assert json.loads(arrival.body) == body
    assert end.body == answer.body
    assert (end.status, end.aborted, end.cut) == (200, False, False)
    assert arrival.at_s < end.first_s <= end.at_s
    stored = events.wait(lambda seen: [event for event in seen if event["type"] == "BlockStored"])
    assert {event.get("session_id") for event in stored} == {arrival.id}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages"])
def test_every_api_is_labelled(engine_worker: EngineWorker, events: KvListener, path: str) -> None:
    since = len(engine_worker.notes.notes)
    text = story(path)
    body: dict[str, Any] = {"model": name(engine_worker)}
    body |= {
        "/v1/completions": {"prompt": text, "max_tokens": 2},
        "/v1/responses": {"input": text, "max_output_tokens": 2, "store": False},
        "/v1/messages": {"messages": [{"role": "user", "content": text}], "max_tokens": 2},
    }[path]
    answer = engine_worker.post(path, body, {"x-session-id": "evil"})
    assert answer.status == 200, answer.body
    arrival, _ = engine_worker.notes.exchange(since)
    stored = events.wait(lambda seen: [event for event in seen if event["type"] == "BlockStored"])
    assert {event.get("session_id") for event in stored} == {arrival.id}


def test_stream_is_noted_as_the_client_saw_it(engine_worker: EngineWorker) -> None:
    since = len(engine_worker.notes.notes)
    answer = chat(engine_worker, "Say something.", max_tokens=8, stream=True)
    _, end = engine_worker.notes.exchange(since)
    assert end.body == answer.body
    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert 0 < end.first_s < end.at_s


def test_client_that_leaves_ends_as_aborted(engine_worker: EngineWorker) -> None:
    since = len(engine_worker.notes.notes)
    stream = open_stream(engine_worker, 3000)
    stream.close()
    _, end = engine_worker.notes.exchange(since)
    assert end.aborted
    assert inflight(engine_worker) == 0


def test_fence_refuses_new_requests_and_lets_running_ones_end(engine_worker: EngineWorker) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(chat, engine_worker, "Count to a thousand.", max_tokens=60, ignore_eos=True)
        wait_inflight(engine_worker, 1)
        engine_worker.notes.command(note.Fence(on=True))
        engine_worker.notes.wait(lambda seen: isinstance(seen[-1], note.Counts) and seen[-1].fenced)
        refused = chat(engine_worker, "hello")
        assert (refused.status, refused.headers["x-prefixpool-fenced"]) == (503, "1")
        assert engine_worker.get("/metrics").status == 200
        assert running.result().json()["usage"]["completion_tokens"] == 60
    engine_worker.notes.command(note.Fence(on=False))
    engine_worker.notes.wait(lambda seen: isinstance(seen[-1], note.Counts) and not seen[-1].fenced)
    assert chat(engine_worker, "hello").status == 200


def test_bound_is_kept(engine_worker: EngineWorker) -> None:
    streams = [open_stream(engine_worker, 3000) for _ in range(4)]
    try:
        wait_inflight(engine_worker, 4)
        refused = chat(engine_worker, "hello")
        assert (refused.status, refused.headers["x-prefixpool-busy"]) == (503, "1")
    finally:
        for stream in streams:
            stream.close()
    wait_inflight(engine_worker, 0)
    assert chat(engine_worker, "hello").status == 200


def test_full_report_announces_reused_blocks(engine_worker: EngineWorker, events: KvListener) -> None:
    text = story("Bob")
    chat(engine_worker, text)
    stored = events.wait(lambda seen: [event for event in seen if event["type"] == "BlockStored"])
    engine_worker.notes.command(note.ReportFull(requests=1))
    time.sleep(0.2)  # noqa: TID251 - the command has no acknowledgement
    since, count = len(engine_worker.notes.notes), len(events.events)
    chat(engine_worker, text)
    arrival, _ = engine_worker.notes.exchange(since)
    assert arrival.full
    again = events.wait(lambda seen: [event for event in seen[count:] if event["type"] == "BlockStored"])
    assert {event["session_id"] for event in again} == {arrival.id}
    assert {hash_ for event in again for hash_ in event["block_hashes"]} & {h for e in stored for h in e["block_hashes"]}


def test_cache_reset_is_told_before_the_client_hears(engine_worker: EngineWorker) -> None:
    wait_inflight(engine_worker, 0)
    answer = engine_worker.ask("POST", "/reset_prefix_cache")
    assert answer.json() == {"success": True}
    reset = engine_worker.notes.wait(lambda seen: seen[-1] if isinstance(seen[-1], note.CacheReset) else None)
    assert not reset.external


def test_agent_that_comes_back_hears_it_all_again(engine_worker: EngineWorker) -> None:
    chat(engine_worker, "hello")
    before = [seen for seen in engine_worker.notes.notes if isinstance(seen, note.Arrival)][-1]
    hellos = count(engine_worker, note.GateHello)
    engine_worker.notes.hang_up()
    engine_worker.notes.wait(lambda _: count(engine_worker, note.GateHello) > hellos)
    since = len(engine_worker.notes.notes)
    engine_worker.notes.command(note.Resend())
    engine_worker.notes.wait(lambda seen: before in seen[since:])


def test_metrics_facts_and_progress_are_read(engine_worker: EngineWorker) -> None:
    load = parse_load(engine_worker.get("/metrics").body.decode())
    assert load.cache == CacheConfig(block_tokens=32, blocks=321)
    assert load.prompt_tokens > 0
    assert engine_worker.get("/version").json()["version"].startswith("0.32.")
    assert progress((engine_worker.run_dir / "engine.log").read_text().splitlines()).ready


def test_kv_events_are_on_unix_sockets_only_and_prompts_in_no_log(engine_worker: EngineWorker) -> None:
    secret = "Zanzibarian heliotropes"
    chat(engine_worker, secret)
    assert secret not in (engine_worker.run_dir / "engine.log").read_text()
    sources = engine_worker.get("/kv_event_sources").body
    assert b"ipc://" in sources
    assert b"tcp://" not in sources


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe{", b"[" * 20_000, b'{"model":1}'])
def test_malformed_requests_get_a_client_error_and_hurt_nobody(engine_worker: EngineWorker, body: bytes) -> None:
    assert 400 <= engine_worker.ask("POST", "/v1/chat/completions", body).status < 500
    assert chat(engine_worker, "hello").status == 200
    wait_inflight(engine_worker, 0)  # the client may have its answer before the engine's coroutine returns


def test_engine_killed_comes_back_and_supervisor_killed_leaves_nothing(model: str) -> None:
    with TemporaryDirectory(prefix="pp") as folder:
        worker = EngineWorker(Path(folder), model, *OPTIONS)
        worker.start()
        try:
            before = worker.until(lambda state: state["engine"]["shm"])
            os.kill(before["engine"]["pid"], signal.SIGKILL)
            worker.until(lambda state: state["engine"]["restarts"] == 1)
            assert [what for what in worker.left_over(before) if what.startswith("shm")] == []
            after = worker.wait_serving()
            assert after["engine"]["epoch"] > before["engine"]["epoch"]
            hello = worker.notes.wait(lambda seen: next((n for n in reversed(seen) if isinstance(n, note.GateHello)), None))
            assert hello.epoch == after["engine"]["epoch"]
            assert chat(worker, "hello").status == 200
        finally:
            state = worker.state()
            worker.process.kill()
            worker.process.wait()
            worker.notes.close()
        end = time.monotonic() + 20
        while [what for what in worker.left_over(state) if not what.startswith("socket")]:
            assert time.monotonic() < end, worker.left_over(state)
            time.sleep(0.1)  # noqa: TID251 - processes, no event loop


def open_stream(engine_worker: EngineWorker, max_tokens: int) -> http.client.HTTPConnection:
    """A long stream, up to its first bytes."""
    connection = http.client.HTTPConnection("127.0.0.1", engine_worker.port, timeout=120)
    body = {"model": name(engine_worker), "prompt": "Once", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    connection.getresponse().read(10)
    return connection


def inflight(engine_worker: EngineWorker) -> int:
    with GateState(engine_worker.run_dir / "gate.state") as state:
        return state.inflight()


def wait_inflight(engine_worker: EngineWorker, wanted: int) -> None:
    end = time.monotonic() + 20
    while inflight(engine_worker) != wanted:
        assert time.monotonic() < end
        time.sleep(0.02)  # noqa: TID251 - processes, no event loop


def count(engine_worker: EngineWorker, kind: type[note.FromGate]) -> int:
    return sum(isinstance(seen, kind) for seen in engine_worker.notes.notes)
