"""`prefixpool-worker drain` against an agent of a few lines: what it asks, and what it makes of every answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prefixpool.wire import DrainPhase, DrainRequest, DrainStatus
from prefixpool_agent import drain_command

DONE = (200, msgspec.json.encode(DrainStatus(phase=DrainPhase.DONE, reason="all requests ended")))
Answer = tuple[int, bytes] | None  # None: the connection ends without one


class Agent:
    """Answers one after the other; without one more it is gone."""

    def __init__(self) -> None:
        self.answers: list[Answer] = [DONE]
        self.asked: list[DrainRequest] = []
        self.authorization = ""
        agent = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                agent.asked.append(msgspec.json.decode(body, type=DrainRequest))
                agent.authorization = self.headers["Authorization"]
                agent.answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        answer = self.answers.pop(0)
        if answer is not None:
            handler.send_response(answer[0])
            handler.end_headers()
            handler.wfile.write(answer[1])
        if not self.answers:
            self._server.socket.close()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    monkeypatch.setattr(drain_command, "_GONE_S", 0.3)
    monkeypatch.setattr(drain_command, "_RETRY_S", 0.02)
    made = Agent()
    yield made
    made.stop()


@pytest.fixture
def drain(tmp_path: Path, agent: Agent, capsys: pytest.CaptureFixture[str]) -> Callable[[], tuple[int, str]]:
    """Exit status and what it said."""
    (tmp_path / "key").write_text("new\nold\n")
    env = {
        "PREFIXPOOL_WORKER_ENGINE_KEY_FILE": str(tmp_path / "key"),
        "PREFIXPOOL_WORKER_HOST": "0.0.0.0",
        "PREFIXPOOL_WORKER_AGENT_PORT": str(agent.port),
        "PREFIXPOOL_WORKER_DRAIN_TIMEOUT_S": "7",
        "PREFIXPOOL_WORKER_MODEL": "what else the container has",
    }
    return lambda: (drain_command.main([], env), capsys.readouterr().err)


def test_it_fences_and_waits_but_leaves_the_engine_to_sigterm(agent: Agent, drain: Callable[[], tuple[int, str]]) -> None:
    assert drain() == (0, "prefixpool-worker drain: done: all requests ended\n")
    (asked,) = agent.asked
    assert (asked.stop, asked.wait) == (False, True)
    assert 6 < asked.timeout_s <= 7
    assert agent.authorization == "Bearer new"


def test_an_agent_that_dies_meanwhile_is_asked_again_when_it_is_back(
    agent: Agent, drain: Callable[[], tuple[int, str]]
) -> None:
    agent.answers = [None, None, DONE]
    assert drain()[0] == 0
    assert len(agent.asked) == 3


def test_an_agent_that_is_gone_has_nothing_to_drain(agent: Agent, drain: Callable[[], tuple[int, str]]) -> None:
    drain()
    assert drain() == (0, "prefixpool-worker drain: no agent answers, so nothing is drained\n")


@pytest.mark.parametrize("answer", [(401, b"who are you?"), (200, b"<html>"), (503, b"")])
def test_a_refusal_is_told(agent: Agent, drain: Callable[[], tuple[int, str]], answer: Answer) -> None:
    agent.answers = [answer]
    status, said = drain()
    assert status == 1
    assert f"port {agent.port}" in said


def test_a_missing_key_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert drain_command.main(["--engine-key-file", str(tmp_path / "key")], {}) == 2
    assert "key: No such file or directory" in capsys.readouterr().err
