"""Gate, supervisor and vLLM adapter with a real vLLM."""

from __future__ import annotations

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from prefixpool import note
from prefixpool_agent.engines.progress import progress
from prefixpool_agent.gate_state import GateState
from prefixpool_testing.engine_worker import KEY, Answer, EngineWorker

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


def test_stream_is_noted_as_the_client_saw_it(engine_worker: EngineWorker) -> None:
    since = len(engine_worker.notes.notes)
    answer = chat(engine_worker, "Say something.", max_tokens=8, stream=True)
    _, end = engine_worker.notes.exchange(since)
    assert end.body == answer.body
    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert 0 < end.first_s < end.at_s


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
    streams = [open_stream(engine_worker, 1500) for _ in range(4)]
    try:
        wait_inflight(engine_worker, 4)
        refused = chat(engine_worker, "hello")
        assert (refused.status, refused.headers["x-prefixpool-busy"]) == (503, "1")
    finally:
        for stream in streams:
            stream.close()
    wait_inflight(engine_worker, 0)
    assert chat(engine_worker, "hello").status == 200


def test_agent_that_comes_back_hears_it_all_again(engine_worker: EngineWorker) -> None:
    chat(engine_worker, "hello")
    before = [seen for seen in engine_worker.notes.notes if isinstance(seen, note.Arrival)][-1]
    hellos = count(engine_worker, note.GateHello)
    engine_worker.notes.hang_up()
    engine_worker.notes.wait(lambda _: count(engine_worker, note.GateHello) > hellos)
    since = len(engine_worker.notes.notes)
    engine_worker.notes.command(note.Resend())
    engine_worker.notes.wait(lambda seen: before in seen[since:])


def test_version_is_known_and_progress_is_read_from_the_log(engine_worker: EngineWorker) -> None:
    assert engine_worker.get("/version").json()["version"].startswith("0.32.")
    assert progress((engine_worker.run_dir / "engine.log").read_text().splitlines()).ready


def test_prompts_are_in_no_log(engine_worker: EngineWorker) -> None:
    secret = "Zanzibarian heliotropes"
    chat(engine_worker, secret)
    assert secret not in (engine_worker.run_dir / "engine.log").read_text()


def test_supervisor_killed_leaves_nothing(engine_worker: EngineWorker) -> None:
    """The last of all: no worker is left to others. An engine that is killed comes back: test_engine_spill_disk.py."""
    state = engine_worker.until(lambda state: state["engine"]["shm"])
    assert chat(engine_worker, "hello").status == 200
    engine_worker.process.kill()
    end = time.monotonic() + 20
    while [what for what in engine_worker.left_over(state) if not what.startswith("socket")]:
        assert time.monotonic() < end, engine_worker.left_over(state)
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
