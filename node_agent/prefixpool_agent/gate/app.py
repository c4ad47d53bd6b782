"""The middleware itself: key, path, fence, bound, label, notes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs

import msgspec

from prefixpool import names, note
from prefixpool.errors import Dialect, RequestError, SettingsError, error_body
from prefixpool_agent.gate.body import Edited, edit
from prefixpool_agent.gate.keys import KeyFile
from prefixpool_agent.gate.link import NoteLink
from prefixpool_agent.gate.paths import Kind, classify
from prefixpool_agent.gate.reply import Message, Receive, Reply, ReplyBudget, Send
from prefixpool_agent.gate_state import GateState, Slot

Scope = Mapping[str, Any]
App = Callable[[Any, Receive, Send], Awaitable[None]]

_BODY_DEADLINE_S: Final = 60.0
_MAX_BODY_BYTES: Final = 128 << 20
_MAX_REPORTS: Final = 100_000
_LABEL_HEADER: Final = names.H_SESSION.encode()


class GateConfig(NamedTuple):
    """What the worker tells the gate, through the engine's environment."""

    run_dir: Path
    key_file: Path
    epoch: int
    max_inflight: int  # 0: no bound

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> GateConfig:
        """Raises SettingsError."""
        try:
            return cls(
                run_dir=Path(env[names.ENV_RUN_DIR]),
                key_file=Path(env[names.ENV_ENGINE_KEY_FILE]),
                epoch=int(env[names.ENV_EPOCH]),
                max_inflight=int(env.get(names.ENV_MAX_INFLIGHT, "0")),
            )
        except KeyError as error:
            raise SettingsError(f"the gate needs {error.args[0]} in the engine's environment") from error
        except ValueError as error:
            raise SettingsError(f"the gate's environment: {error}") from error


class Gate:
    """ASGI middleware; one instance in each API server process."""

    def __init__(self, app: App, config: GateConfig | None = None) -> None:
        """Raises SettingsError or GateStateError: an engine without a working gate must not serve."""
        self._app = app
        self._config = config or GateConfig.from_env(os.environ)
        self._keys = KeyFile(self._config.key_file)
        self._state = GateState(self._config.run_dir / names.RUN_GATE_STATE)
        self._link = NoteLink(
            self._config.run_dir / names.RUN_NOTES_SOCK, hello=self._hello, on_command=self._command, on_tick=self._tick
        )
        self._budget = ReplyBudget()
        self._slot: Slot | None = None
        self._writer: asyncio.Task[None] | None = None
        self._counter = 0
        self._reports = 0  # requests that still are to ask for the full report
        self._was_fenced = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})

    # ---- life ----

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def watched(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                self._open()  # a claimed slot tells the supervisor that the engine is up
            elif message["type"] == "lifespan.shutdown.complete":
                await self._close()  # now: behind this message servers end all tasks, and would report ours as a fault
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            await self._close()

    def _open(self) -> Slot:
        if self._slot is None:
            self._slot = self._state.claim(os.getpid())
        if self._writer is None or self._writer.done():  # it ends only by a bug, which asyncio logs: notes must go on
            self._writer = asyncio.get_running_loop().create_task(self._link.run(), name="gate notes")
        return self._slot

    async def _close(self) -> None:
        if self._slot is not None:
            self._slot.release()
            self._slot = None
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
            self._writer = None

    # ---- the agent ----

    def _hello(self, dropped: int) -> note.GateHello:
        return note.GateHello(version=note.VERSION, epoch=self._config.epoch, pid=os.getpid(), dropped=dropped)

    def _command(self, command: note.ToGate) -> None:
        if isinstance(command, note.Fence):
            self._state.fence(command.on)
            self._note_counts()
        elif isinstance(command, note.ReportFull):
            self._reports = max(0, min(command.requests, _MAX_REPORTS))

    def _tick(self) -> None:
        if self._state.reap() or self._was_fenced != self._state.fenced:
            self._note_counts()

    def _note_counts(self) -> None:
        self._was_fenced = self._state.fenced
        self._link.put(note.Counts(inflight=self._state.inflight(), fenced=self._was_fenced))

    # ---- requests ----

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if not self._keys.accepts(scope["headers"]):
            await _refuse(send, path, RequestError(401, "this engine takes requests with the pool's engine key only"))
            return
        kind = classify(scope["method"], path)
        if kind is None:
            await _refuse(send, path, RequestError(404, "not an open path of this engine"))
        elif kind is Kind.LIGHT:
            await self._app(scope, receive, send)
        elif kind is Kind.RESET:
            await self._reset(scope, receive, send)
        else:
            await self._work(kind, scope, receive, send)

    async def _work(self, kind: Kind, scope: Scope, receive: Receive, send: Send) -> None:
        slot = self._open()
        slot.enter()  # before the decision: two processes at the bound may both refuse, but never both exceed it
        refusal = self._refusal()
        if refusal is not None:
            slot.leave()
            await _refuse(send, scope["path"], refusal.error, (refusal.header.encode(), b"1"))
            return
        reply: Reply | None = None
        try:
            body = await _read_body(receive, send, scope["path"]) if kind is Kind.CHAIN else b""
            if body is None:
                return
            slot.admitted()
            inner, reply = self._arrive(kind, scope, body, receive, send)
            await self._app(inner, reply.receive, reply.send)
        except asyncio.CancelledError:
            if reply is not None:
                reply.client_left()
            raise
        finally:
            slot.leave()
            if reply is not None:
                self._link.put(reply.end())

    def _refusal(self) -> _Refusal | None:
        if self._state.fenced:
            error = RequestError(503, "this replica is draining", code="fenced", retry_after_s=1)
            return _Refusal(error, names.H_FENCED)
        if 0 < self._config.max_inflight < self._state.inflight():
            error = RequestError(503, "this replica has as many requests as it takes", code="busy", retry_after_s=1)
            return _Refusal(error, names.H_BUSY)
        return None

    def _arrive(self, kind: Kind, scope: Scope, body: bytes, receive: Receive, send: Send) -> tuple[Scope, Reply]:
        """Label the request and tell the agent of it."""
        self._counter += 1
        label = f"{self._config.epoch:x}-{os.getpid():x}-{self._counter:x}"
        chain = kind is Kind.CHAIN
        edited = edit(body, full=self._reports > 0) if chain else Edited(body, False)
        self._reports -= edited.full
        cut = not chain or len(edited.body) > note.MAX_BODY_BYTES
        self._link.put(
            note.Arrival(
                id=label,
                at_s=time.monotonic(),
                path=scope["path"],
                body=b"" if cut else edited.body,
                full=edited.full,
                cut=cut,
            )
        )
        reply = Reply(label, receive, send, self._budget, body=edited.body if chain else None, keep=chain)
        length = len(edited.body) if chain and edited.body is not body else None
        return {**scope, "headers": _labelled(scope["headers"], label, length)}, reply

    async def _reset(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The engine publishes a reset only with its next step, so the agent hears of it here, before the client does."""
        external = _flag(scope.get("query_string", b""), "reset_external")

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.body" and _succeeded(message.get("body", b"")):
                self._link.put(note.CacheReset(at_s=time.monotonic(), external=external))
            await send(message)

        self._open()
        await self._app(scope, receive, watched)


class _Refusal(NamedTuple):
    error: RequestError
    header: str


async def _refuse(send: Send, path: str, error: RequestError, *headers: tuple[bytes, bytes]) -> None:
    body = error_body(error, Dialect.of_path(path))
    fixed = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if error.retry_after_s is not None:
        fixed.append((b"retry-after", b"%d" % error.retry_after_s))
    if error.status == 401:
        fixed.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.status, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _read_body(receive: Receive, send: Send, path: str) -> bytes | None:
    """None: the client went away, or was answered because its body is too large or too slow."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(_BODY_DEADLINE_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                part = message.get("body", b"")
                size += len(part)
                if size > _MAX_BODY_BYTES:
                    await _refuse(send, path, RequestError(413, f"body of more than {_MAX_BODY_BYTES} bytes"))
                    return None
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        await _refuse(send, path, RequestError(408, f"body not complete after {_BODY_DEADLINE_S:.0f} s"))
        return None


def _labelled(headers: Iterable[tuple[bytes, bytes]], label: str, length: int | None) -> list[tuple[bytes, bytes]]:
    """`length`: of a body that was changed."""
    drop = {_LABEL_HEADER} if length is None else {_LABEL_HEADER, b"content-length", b"transfer-encoding"}
    kept = [(name, value) for name, value in headers if name not in drop]
    kept.append((_LABEL_HEADER, label.encode()))
    if length is not None:
        kept.append((b"content-length", b"%d" % length))
    return kept


def _flag(query: bytes, name: str) -> bool:
    values = parse_qs(query.decode("latin-1")).get(name, [])
    return bool(values) and values[-1].lower() in {"1", "true", "on", "yes", "y", "t"}  # as pydantic reads a bool


def _succeeded(body: bytes) -> bool:
    try:
        answer = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return False
    return isinstance(answer, dict) and answer.get("success") is True
