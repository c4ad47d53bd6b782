"""One worker with a real engine and, in the agent's place, a listener that the tests can look into."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import zmq

from prefixpool import names, note
from prefixpool_agent import shm, worker
from prefixpool_agent.supervisor.plan import Plan
from prefixpool_cli.claims import Claims
from prefixpool_cli.ports import claim_ports

KEY: Final = "engine-key-of-the-tests"
# Small, so that eviction and the bound are easy to reach; `dev_mode` for /reset_prefix_cache.
DEVICE_BLOCKS: Final = 97
KV_BYTES: Final = 72_000_000  # which SmolLM2-135M has as many blocks in, and a part of one more
MAX_MODEL_LEN: Final = 2048
OPTIONS: Final = (
    *("--device", "cpu", "--enforce-eager", "true", "--dev-mode", "true", "--served-model-name", "contract"),
    *("--block-tokens", "32", "--device-blocks", str(DEVICE_BLOCKS)),
    *("--max-model-len", str(MAX_MODEL_LEN), "--max-inflight", "4"),
)
T = TypeVar("T")
_POLL_S: Final = 0.05


class NoteListener:
    """Listens on `notes.sock` like the agent; keeps everything it is told."""

    def __init__(self, path: Path) -> None:
        self.notes: list[note.FromGate] = []
        self._news = threading.Condition()
        self._connection: socket.socket | None = None
        path.unlink(missing_ok=True)
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._server.close()
        self.hang_up()

    def hang_up(self) -> None:
        """As if the agent died."""
        if self._connection is not None:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def command(self, command: note.ToGate) -> None:
        assert self._connection is not None
        self._connection.sendall(note.frame(command))

    def wait(self, find: Callable[[list[note.FromGate]], T | None], deadline_s: float = 20) -> T:
        """The first true result of `find` over all notes so far. Raises AssertionError."""
        end = time.monotonic() + deadline_s
        with self._news:
            while not (found := find(self.notes)):
                left_s = end - time.monotonic()
                assert left_s > 0, f"not noted; last notes: {[type(seen).__name__ for seen in self.notes[-5:]]}"
                self._news.wait(left_s)
            return found

    def exchange(self, since: int) -> tuple[note.Arrival, note.End]:
        """The first request behind note number `since`, from arrival to end."""

        def find(notes: list[note.FromGate]) -> tuple[note.Arrival, note.End] | None:
            arrival = next((seen for seen in notes[since:] if isinstance(seen, note.Arrival)), None)
            if arrival is None:
                return None
            end = next((seen for seen in notes[since:] if isinstance(seen, note.End) and seen.id == arrival.id), None)
            return (arrival, end) if end else None

        return self.wait(find)

    def _serve(self) -> None:
        with suppress(OSError):  # closed: the end of this thread
            while True:
                connection, _ = self._server.accept()
                self._connection = connection
                self._read(connection)

    def _read(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream, suppress(OSError):
            while len(header := stream.read(note.LENGTH.size)) == note.LENGTH.size:
                (length,) = note.LENGTH.unpack(header)
                message = note.decode_from_gate(stream.read(length))
                with self._news:
                    self.notes.append(message)
                    self._news.notify_all()


class KvListener:
    """Subscribes to the engine's KV events; keeps them all."""

    def __init__(self, run_dir: Path) -> None:
        self.events: list[dict[str, Any]] = []
        self.numbers: list[int] = []  # of the batches that they came in
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.subscribe(b"")
        self._socket.connect(f"ipc://{run_dir}/{names.RUN_KV_PUB}")

    def wait(self, find: Callable[[list[dict[str, Any]]], T | None], deadline_s: float = 20) -> T:
        """The first true result of `find` over all events so far. Raises AssertionError."""
        end = time.monotonic() + deadline_s
        while not (found := find(self.events)):
            assert time.monotonic() < end, f"no such event; last: {[event['type'] for event in self.events[-5:]]}"
            if self._socket.poll(100):
                *_, number, payload = self._socket.recv_multipart()
                self.numbers.append(int.from_bytes(number, "big"))
                self.events += msgspec.msgpack.decode(payload)[1]
        return found

    def close(self) -> None:
        self._socket.close()
        self._context.term()


@contextmanager
def listening(run_dir: Path) -> Iterator[KvListener]:
    """Returns when events of from now on are heard."""
    listener = KvListener(run_dir)
    try:
        time.sleep(0.2)  # noqa: TID251 - a subscription has no acknowledgement
        yield listener
    finally:
        listener.close()


class EngineWorker:
    """A supervisor with a real engine; everything is gone after `stop()`."""

    def __init__(self, run_dir: Path, model: str, *options: str) -> None:
        self.run_dir = run_dir
        self._claims = Claims()  # for as long as this lives: it may be started again
        self.port, agent_port = claim_ports(self._claims, 2)
        key = run_dir / "key"
        key.write_text(KEY + "\n")
        flags = ["--replica", "test-0", "--run-dir", str(run_dir), "--model", model, "--engine-key-file", str(key)]
        flags += ["--engine-port", str(self.port), "--agent-port", str(agent_port), *options]
        settings = worker.read_settings(flags, dict(os.environ))
        self.plan = worker.worker_plan(settings, worker.look_at_host(settings.model, settings.run_dir))

    def start(self, change: Callable[[Plan], Plan] = lambda plan: plan) -> None:
        """Returns when the engine serves. Raises AssertionError with the reason if it does not."""
        quiet = replace(self.plan.agent, argv=(sys.executable, "-c", "import time; time.sleep(1e6)"))
        self.plan = change(replace(self.plan, agent=quiet))
        path = self.run_dir / worker.PLAN_FILE
        path.write_text(self.plan.to_json())
        self.notes = NoteListener(self.run_dir / names.RUN_NOTES_SOCK)
        self.process = subprocess.Popen([sys.executable, "-m", "prefixpool_agent.supervisor", str(path)])
        # The supervisor removes a stale notes.sock when it begins: listen again behind that.
        self.until(lambda state: state["agent"]["pid"])
        self.notes.close()
        self.notes = NoteListener(self.run_dir / names.RUN_NOTES_SOCK)
        self.wait_serving()

    def wait_serving(self, deadline_s: float = 600) -> dict[str, Any]:
        """Until the present engine's gate has said hello."""
        state = self.until(lambda state: state["engine"]["phase"] == "running", deadline_s)
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            assert self.state()["engine"]["phase"] == "running", self.state()["engine"]["reason"]
            with suppress(OSError):
                if self.get("/health").status == 200:
                    return state
            time.sleep(_POLL_S)  # noqa: TID251 - processes, no event loop
        raise AssertionError("the engine does not answer")

    def kill_engine(self) -> None:
        """SIGKILL to its first process. Returns when another serves, in an epoch of its own, and nothing of it is left."""
        state = self.state()
        dead = state["engine"]
        os.kill(dead["pid"], signal.SIGKILL)
        self.until(lambda now: now["engine"]["restarts"] == dead["restarts"] + 1)
        assert not shm.group_members(dead["pid"])
        assert [what for what in self.left_over(state) if what.startswith("shm")] == []
        epoch = self.wait_serving()["engine"]["epoch"]
        assert epoch > dead["epoch"]
        self.notes.wait(lambda seen: any(isinstance(each, note.GateHello) and each.epoch == epoch for each in seen))

    def state(self) -> dict[str, Any]:
        with suppress(FileNotFoundError):
            return dict(json.loads((self.run_dir / names.RUN_SUPERVISOR_STATE).read_text()))
        return {}

    def until(self, what: Callable[[dict[str, Any]], Any], deadline_s: float = 30) -> dict[str, Any]:
        """Until the supervisor's state is as wanted."""
        end = time.monotonic() + deadline_s
        while not ((state := self.state()) and state["pid"] == self.process.pid and what(state)):
            assert time.monotonic() < end, f"not reached: {state}"
            assert self.process.poll() is None, "the supervisor ended"
            time.sleep(_POLL_S)  # noqa: TID251 - processes, no event loop
        return state

    def get(self, path: str) -> Answer:
        return self.ask("GET", path)

    def post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Answer:
        return self.ask("POST", path, json.dumps(body).encode(), headers)

    def ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None, *, key: str | None = KEY
    ) -> Answer:
        """One request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            given = {"content-type": "application/json", **(headers or {})}
            if key is not None:
                given["authorization"] = f"Bearer {key}"
            connection.request(method, path, body, given)
            answer = connection.getresponse()
            return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def stop(self) -> list[str]:
        """SIGTERM; what is left behind, in words (empty: nothing). One that was killed is not judged."""
        if self.process.poll() is not None:
            self.notes.close()
            return []
        state = self.state()
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        self.notes.close()
        return ([f"exit code {code}"] if code else []) + self.left_over(state)

    def left_over(self, state: dict[str, Any]) -> list[str]:
        """Processes, shared memory and sockets of a worker that should be gone."""
        groups = [state[part]["pid"] for part in ("engine", "agent")]
        pids = [pid for group in groups if group for pid in shm.group_members(group)]
        files = [name for name in state["engine"]["shm"] if (shm.SHM / name).exists()]
        sockets = [path.name for path in self.run_dir.iterdir() if path.is_socket()]
        return [f"{kind} {what}" for kind, all_ in (("pid", pids), ("shm", files), ("socket", sockets)) for what in all_]


class Answer(msgspec.Struct, frozen=True):
    """An HTTP answer, read whole."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)
