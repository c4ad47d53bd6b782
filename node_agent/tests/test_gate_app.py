"""The gate as an ASGI middleware, around an application that the tests control."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from prefixpool import note
from prefixpool.errors import SettingsError
from prefixpool_agent.gate import Gate
from prefixpool_agent.gate.app import GateConfig
from prefixpool_agent.gate_state import GateState, GateStateError

KEY = [(b"authorization", b"Bearer k")]
CHAT = "/v1/chat/completions"


class Engine:
    """Stands for vLLM: records what reaches it, answers in chunks, can be held."""

    def __init__(self) -> None:
        self.scopes: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []
        self.status = 200
        self.chunks: list[bytes] = [b'{"ok":true}']
        self.hold: asyncio.Event | None = None
        self.error: Exception | None = None
        self.answers_nobody = False  # writes an answer also when the client has left
        self.entered = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(dict(scope))
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(body)
        self.entered.set()
        if self.error is not None:
            raise self.error
        if self.hold is not None:
            await self._held(receive)
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        for chunk in self.chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _held(self, receive: Callable[[], Awaitable[Any]]) -> None:
        """Like vLLM: wait for the end or the client's disconnect, whichever is first."""
        assert self.hold is not None
        held, gone = asyncio.ensure_future(self.hold.wait()), asyncio.ensure_future(receive())
        done, pending = await asyncio.wait({held, gone}, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        if gone in done and not self.answers_nobody:
            raise asyncio.CancelledError


class Client:
    """One request, driven by hand."""

    def __init__(self, parts: list[bytes]) -> None:
        self._parts = list(parts)
        self.reads = 0
        self.gone = asyncio.Event()
        self.sent: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        self.reads += 1
        if self._parts:
            part = self._parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self._parts)}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(dict(message))

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])


class World:
    def __init__(self, run_dir: Path, max_inflight: int) -> None:
        self.engine = Engine()
        self.gate = Gate(self.engine, GateConfig(run_dir, run_dir / "key", 5, max_inflight))
        self.state = GateState(run_dir / "gate.state")
        self.notes: list[note.FromGate] = []
        self.gate._link.put = self.notes.append  # type: ignore[method-assign]  # the link has tests of its own

    async def ask(
        self,
        path: str = CHAT,
        body: bytes | list[bytes] = b'{"model":"m"}',
        headers: list[tuple[bytes, bytes]] = KEY,
        method: str = "POST",
        query: bytes = b"",
    ) -> Client:
        client = Client([body] if isinstance(body, bytes) else body)
        await self.gate(scope(path, headers, method, query), client.receive, client.send)
        return client

    def of(self, kind: type[note.FromGate]) -> list[Any]:
        return [message for message in self.notes if isinstance(message, kind)]


def scope(path: str, headers: list[tuple[bytes, bytes]] = KEY, method: str = "POST", query: bytes = b"") -> dict[str, Any]:
    return {"type": "http", "method": method, "path": path, "headers": headers, "query_string": query}


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Callable[..., World]]:
    (tmp_path / "key").write_text("k\n")
    GateState.create(tmp_path / "gate.state")
    worlds: list[World] = []

    def build(max_inflight: int = 0) -> World:
        worlds.append(World(tmp_path, max_inflight))
        return worlds[-1]

    yield build
    for world in worlds:
        await world.gate._close()
        world.state.close()


@pytest.fixture
def world(make: Callable[..., World]) -> World:
    return make()


@pytest.mark.parametrize("path", [CHAT, "/health", "/metrics", "/tokenize", "/kv_event_sources", "/docs", "/nowhere", "/"])
async def test_no_path_is_open_without_the_key_and_no_body_is_read(world: World, path: str) -> None:
    client = await world.ask(path, headers=[])
    assert client.status == 401
    assert client.reads == 0
    assert world.engine.scopes == []


async def test_refusals_have_the_shape_of_the_clients_api(world: World) -> None:
    openai = json.loads((await world.ask(headers=[])).body)
    anthropic = json.loads((await world.ask("/v1/messages", headers=[])).body)
    assert openai["error"]["type"] == "authentication_error"
    assert anthropic["type"] == "error"
    assert anthropic["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    "path", ["/docs", "/openapi.json", "/collective_rpc", "/v1/load_lora_adapter", "//v1/models", "/v1/../docs"]
)
async def test_unknown_paths_do_not_reach_the_engine(world: World, path: str) -> None:
    assert (await world.ask(path)).status == 404
    assert world.engine.scopes == []


async def test_label_is_ours_whatever_the_client_sends(world: World) -> None:
    headers = [*KEY, (b"x-session-id", b"evil"), (b"x-session-id", b"evil2"), (b"content-length", b"33")]
    await world.ask(body=b'{"session_id":"evil","model":"m"}', headers=headers)
    (arrival,) = world.of(note.Arrival)
    sent = world.engine.scopes[0]["headers"]
    assert [value for name, value in sent if name == b"x-session-id"] == [arrival.id.encode()]
    assert world.engine.bodies == [b'{"model":"m"}'] == [arrival.body]
    assert dict(sent)[b"content-length"] == b"13"


async def test_labels_differ(world: World) -> None:
    for _ in range(3):
        await world.ask()
    assert len({arrival.id for arrival in world.of(note.Arrival)}) == 3


async def test_body_in_parts_arrives_whole(world: World) -> None:
    await world.ask(body=[b'{"mod', b'el":', b'"m"}'])
    assert world.engine.bodies == [b'{"model":"m"}']


async def test_arrival_and_end_tell_the_whole_story(world: World) -> None:
    world.engine.chunks = [b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n', b"data: {}\n\n", b"data: [DONE]\n\n"]
    client = await world.ask()
    arrival, end = world.notes
    assert isinstance(arrival, note.Arrival)
    assert isinstance(end, note.End)
    assert (arrival.path, arrival.cut, arrival.full) == (CHAT, False, False)
    assert (end.id, end.status, end.aborted, end.cut) == (arrival.id, 200, False, False)
    assert end.body == client.body == b"".join(world.engine.chunks)
    assert arrival.at_s <= end.first_s <= end.at_s


async def test_first_content_is_not_the_role_preamble(world: World) -> None:
    world.engine.chunks = [b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n']
    await world.ask()
    assert world.of(note.End)[0].first_s == 0.0


async def test_fence_refuses_at_once_and_leaves_nothing_counted(world: World) -> None:
    world.gate._command(note.Fence(on=True))
    client = await world.ask()
    assert client.status == 503
    assert client.headers[b"x-prefixpool-fenced"] == b"1"
    assert client.reads == 0
    assert world.state.inflight() == 0
    assert world.notes == [note.Counts(inflight=0, fenced=True)]
    world.gate._command(note.Fence(on=False))
    assert (await world.ask()).status == 200


async def test_fenced_engine_still_answers_the_agent(world: World) -> None:
    world.state.fence(True)
    assert (await world.ask("/metrics", method="GET")).status == 200
    assert (await world.ask("/tokenize")).status == 200


async def test_bound_is_exact_and_frees_again(make: Callable[..., World]) -> None:
    world = make(max_inflight=2)
    world.engine.hold = asyncio.Event()
    running = [asyncio.create_task(world.ask()) for _ in range(2)]
    await asyncio.sleep(0.01)
    assert world.state.inflight() == 2
    refused = await world.ask()
    assert refused.status == 503
    assert refused.headers[b"x-prefixpool-busy"] == b"1"
    assert refused.headers[b"retry-after"] == b"1"
    assert world.state.inflight() == 2
    world.engine.hold.set()
    await asyncio.gather(*running)
    assert world.state.inflight() == 0
    assert (await world.ask()).status == 200
    assert world.state.total() == 3


async def test_bound_counts_other_processes(make: Callable[..., World]) -> None:
    world = make(max_inflight=2)
    other = world.state.claim(os.getppid())
    other.enter()
    other.enter()
    assert (await world.ask()).status == 503
    other.leave()
    assert (await world.ask()).status == 200


async def test_client_that_leaves_ends_as_aborted(world: World) -> None:
    world.engine.hold = asyncio.Event()
    client = Client([b"{}"])
    task = asyncio.create_task(world.gate(scope(CHAT), client.receive, client.send))
    await world.engine.entered.wait()
    client.gone.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    (end,) = world.of(note.End)
    assert (end.aborted, end.status) == (True, 0)
    assert world.state.inflight() == 0


async def test_null_that_vllm_writes_when_the_client_has_left_is_no_answer(world: World) -> None:
    world.engine.hold, world.engine.answers_nobody, world.engine.chunks = asyncio.Event(), True, [b"null"]
    client = Client([b"{}"])
    client.gone.set()
    await world.gate(scope(CHAT), client.receive, client.send)
    (end,) = world.of(note.End)
    assert (end.aborted, end.status, end.body, end.first_s) == (True, 0, b"", 0)


async def test_client_that_leaves_before_its_body_is_complete_never_arrives(world: World) -> None:
    client = Client([])
    client.gone.set()
    await world.gate(scope(CHAT), client.receive, client.send)
    assert world.notes == []
    assert world.state.inflight() == 0


async def test_engine_error_ends_with_status_0_and_is_passed_on(world: World) -> None:
    world.engine.error = RuntimeError("boom")
    with pytest.raises(RuntimeError, match="boom"):
        await world.ask()
    (end,) = world.of(note.End)
    assert (end.status, end.aborted) == (0, False)
    assert world.state.inflight() == 0


async def test_full_report_is_asked_of_the_next_n_requests_only(world: World) -> None:
    world.gate._command(note.ReportFull(requests=2))
    for _ in range(3):
        await world.ask()
    assert [arrival.full for arrival in world.of(note.Arrival)] == [True, True, False]
    assert json.loads(world.engine.bodies[0])["vllm_xargs"] == {"kv_cache_report_mode": "full"}
    assert b"vllm_xargs" not in world.engine.bodies[2]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b"null", b"[" * 50_000])
async def test_malformed_bodies_reach_the_engine_as_they_are(world: World, body: bytes) -> None:
    world.gate._command(note.ReportFull(requests=9))
    await world.ask(body=body)
    assert world.engine.bodies == [body]
    assert len(world.notes) == 2


async def test_large_answer_is_noted_without_body_and_passed_whole(world: World) -> None:
    world.engine.chunks = [b"x" * (1 << 20)] * 9
    client = await world.ask()
    (end,) = world.of(note.End)
    assert (end.cut, end.body) == (True, b"")
    assert len(client.body) == 9 << 20


async def test_large_request_is_noted_without_body_and_passed_whole(world: World) -> None:
    body = b'{"p":"' + b"x" * note.MAX_BODY_BYTES + b'"}'
    await world.ask(body=body)
    (arrival,) = world.of(note.Arrival)
    assert (arrival.cut, arrival.body) == (True, b"")
    assert world.engine.bodies == [body]


async def test_answers_held_for_notes_are_bounded_over_all_requests(world: World) -> None:
    world.gate._budget._left = 100
    world.engine.chunks = [b"x" * 60]
    await asyncio.gather(*(world.ask() for _ in range(3)))
    assert world.gate._budget._left == 100
    world.engine.chunks = [b"x" * 101]
    await world.ask()
    assert world.of(note.End)[-1].cut
    assert world.gate._budget._left == 100


async def test_audio_passes_unread_and_is_noted_without_body(world: World) -> None:
    await world.ask("/v1/audio/transcriptions", body=[b"a" * 10, b"b" * 10])
    arrival, end = world.notes
    assert isinstance(arrival, note.Arrival)
    assert isinstance(end, note.End)
    assert (arrival.cut, arrival.body, end.cut) == (True, b"", True)
    assert world.engine.bodies == [b"a" * 10 + b"b" * 10]


@pytest.mark.parametrize(
    ("answer", "query", "expected"),
    [
        (b'{"success":true}', b"", [False]),
        (b'{"success":true}', b"reset_external=true", [True]),
        (b'{"success":true}', b"reset_external=false", [False]),
        (b'{"success":false}', b"", []),
        (b"Internal Server Error", b"", []),
    ],
)
async def test_cache_reset_is_told_if_it_succeeded(world: World, answer: bytes, query: bytes, expected: list[bool]) -> None:
    world.engine.chunks = [answer]
    await world.ask("/reset_prefix_cache", query=query)
    assert [reset.external for reset in world.of(note.CacheReset)] == expected


async def test_websockets_are_refused(world: World) -> None:
    client = Client([])
    await world.gate({"type": "websocket", "path": "/v1/realtime", "headers": KEY}, client.receive, client.send)
    assert client.sent == [{"type": "websocket.close", "code": 1008}]


async def test_claimed_slot_tells_that_the_engine_serves(world: World) -> None:
    stop = asyncio.Event()
    sent: list[Any] = []
    messages = iter(["lifespan.startup", "lifespan.shutdown"])

    async def receive() -> dict[str, Any]:
        kind = next(messages)
        if kind == "lifespan.shutdown":
            await stop.wait()
        return {"type": kind}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    assert world.state.pids() == []
    task = asyncio.create_task(world.gate({"type": "lifespan"}, receive, send))
    while not sent:  # noqa: ASYNC110 - turns of the loop, no time
        await asyncio.sleep(0)
    assert world.state.pids() == [os.getpid()]
    stop.set()
    await task
    assert world.state.pids() == []
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def test_an_engine_that_stopped_in_order_logged_a_cancelled_gate_as_an_exception(world: World) -> None:
    told = iter(["lifespan.startup", "lifespan.shutdown"])

    async def receive() -> dict[str, Any]:
        return {"type": next(told)}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "lifespan.shutdown.complete":
            assert world.gate._writer is None, "nothing is left to be cancelled"

    await world.gate({"type": "lifespan"}, receive, send)


async def test_slow_body_is_answered_408(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixpool_agent.gate.app._BODY_DEADLINE_S", 0.01)
    client = Client([])
    await world.gate(scope(CHAT), client.receive, client.send)
    assert client.status == 408
    assert world.state.inflight() == 0


async def test_too_large_body_is_answered_413(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixpool_agent.gate.app._MAX_BODY_BYTES", 10)
    assert (await world.ask(body=[b"x" * 6, b"x" * 6])).status == 413
    assert world.engine.bodies == []


def test_engine_without_a_working_gate_does_not_serve(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="PREFIXPOOL_RUN_DIR"):
        GateConfig.from_env({})
    with pytest.raises(SettingsError, match="No such file"):
        Gate(Engine(), GateConfig(tmp_path, tmp_path / "key", 1, 0))
    (tmp_path / "key").write_text("k")
    with pytest.raises(GateStateError):
        Gate(Engine(), GateConfig(tmp_path, tmp_path / "key", 1, 0))
