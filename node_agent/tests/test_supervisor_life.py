"""A real supervisor with small real processes for engine and agent."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from prefixpool_agent import shm

# Like an engine: claims a slot when it is up, has a child in its group, leaves shared memory behind, may refuse SIGTERM.
ENGINE = """
import mmap, os, signal, subprocess, sys, time
from pathlib import Path
from prefixpool_agent.gate_state import GateState
mode, name = sys.argv[1], sys.argv[2]
print("epoch", os.environ["PREFIXPOOL_EPOCH"], flush=True)
if mode == "broken":
    print("ValueError: no such model", flush=True); sys.exit(3)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
hold = (
    "import mmap,os,time; f=os.open('/dev/shm/%s',os.O_CREAT|os.O_RDWR,0o600); os.ftruncate(f,4096); "
    "m=mmap.mmap(f,4096); print('child up',flush=True); time.sleep(600)"
) % name
child = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE)
child.stdout.readline()
for word in range({"download": 8, "silent": 1}.get(mode, 0)):  # like a download: tells how far it is
    Path(os.environ["PREFIXPOOL_RUN_DIR"], "download.json").write_text(str(word)); time.sleep(0.2)
if mode not in ("mute", "silent"):
    state = GateState(Path(os.environ["PREFIXPOOL_RUN_DIR"]) / "gate.state"); state.claim(os.getpid())
if mode == "tidy":  # like Python's resource tracker: cleans up when the process that it serves is gone
    tidy = "import sys, time, pathlib; sys.stdin.read(); time.sleep(0.1); pathlib.Path(sys.argv[1]).touch()"
    tracker = subprocess.Popen(
        [sys.executable, "-c", tidy, os.environ["PREFIXPOOL_RUN_DIR"] + "/tidied"], stdin=subprocess.PIPE
    )
print("serving", flush=True)
while True: time.sleep(0.05)
"""
AGENT = "import time\nprint('agent up', flush=True)\nwhile True: time.sleep(1)"


class Running:
    """One supervisor and what it looks after."""

    def __init__(self, run_dir: Path, mode: str, **engine: float) -> None:
        self.run_dir = run_dir
        self.shm = f"psm_pptest_{os.getpid()}_{run_dir.name}"
        plan = {
            "run_dir": str(run_dir),
            "engine": {
                "argv": [sys.executable, "-c", ENGINE, mode, self.shm],
                "env": {"PREFIXPOOL_RUN_DIR": str(run_dir)},
                "log": str(run_dir / "engine.log"),
                "stop_timeout_s": engine.get("stop_timeout_s", 5),
                "startup_timeout_s": engine.get("startup_timeout_s", 30),
            },
            "agent": {"argv": [sys.executable, "-c", AGENT], "env": {}, "log": str(run_dir / "agent.log")},
        }
        (run_dir / "worker.json").write_text(json.dumps(plan))
        self.process = self.spawn()

    def spawn(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "prefixpool_agent.supervisor", str(self.run_dir / "worker.json")],
            stderr=subprocess.PIPE,
        )

    def state(self) -> dict[str, Any]:
        with suppress(FileNotFoundError):
            return dict(json.loads((self.run_dir / "supervisor.json").read_text()))
        return {}

    def until(self, what: Callable[[dict[str, Any]], Any], deadline_s: float = 15) -> dict[str, Any]:
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            state = self.state()
            if state and what(state):
                return state
            time.sleep(0.02)  # noqa: TID251 - processes, no event loop
        raise AssertionError(f"not reached: {self.state()}")

    def serving(self) -> dict[str, Any]:
        """Up, its slot claimed, its shared memory recorded."""
        return self.until(
            lambda state: self.shm in state["engine"]["shm"] and state["agent"]["pid"] and self.log_has("serving")
        )

    def log_has(self, text: str) -> bool:
        return text in (self.run_dir / "engine.log").read_text()

    def command(self, **command: Any) -> dict[str, Any]:
        return self.line(json.dumps(command).encode())

    def line(self, line: bytes) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(20)
            connection.connect(str(self.run_dir / "supervisor.sock"))
            connection.sendall(line + b"\n")
            with connection.makefile() as answer:
                return dict(json.loads(answer.readline()))

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(mode: str = "good", **engine: float) -> Running:
        started.append(Running(tmp_path, mode, **engine))
        return started[-1]

    yield start
    for running in started:
        if running.process.poll() is None:
            running.end()
        assert running.process.stderr is not None
        running.process.stderr.close()
        Path("/dev/shm", running.shm).unlink(missing_ok=True)


def gone(pid: int) -> bool:
    return not shm.group_members(pid)


def wait_gone(*pids: int) -> None:
    end = time.monotonic() + 10
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < end, "processes live on"
        time.sleep(0.02)  # noqa: TID251 - processes, no event loop


def test_sigterm_leaves_nothing(launch: Callable[..., Running]) -> None:
    running = launch()
    state = running.serving()
    assert len(shm.group_members(state["engine"]["pid"])) == 2
    assert state["engine"]["phase"] == "running"
    assert running.log_has(f"epoch {state['engine']['epoch']}")
    assert running.end() == 0
    assert gone(state["engine"]["pid"])
    assert gone(state["agent"]["pid"])
    assert not Path("/dev/shm", running.shm).exists()
    assert [path.name for path in running.run_dir.iterdir() if path.is_socket()] == []
    assert running.state()["engine"]["phase"] == "stopped"


def test_semaphores_that_vllm_left_behind_because_its_resource_tracker_was_killed_too_soon(
    launch: Callable[..., Running],
) -> None:
    running = launch("tidy")
    running.serving()
    assert running.end() == 0
    assert (running.run_dir / "tidied").exists()


def test_killed_engine_starts_again_with_a_new_epoch_and_its_group_and_memory_gone(launch: Callable[..., Running]) -> None:
    running = launch()
    before = running.serving()
    inode = (running.run_dir / "gate.state").stat().st_ino
    (running.run_dir / "kv.pub").touch()
    os.kill(before["engine"]["pid"], signal.SIGKILL)
    backoff = running.until(lambda state: state["engine"]["phase"] == "backoff")
    assert gone(before["engine"]["pid"])
    assert not Path("/dev/shm", running.shm).exists()
    assert not (running.run_dir / "kv.pub").exists()
    assert backoff["engine"]["reason"] == "killed by SIGKILL; last log line: serving"
    after = running.until(lambda state: state["engine"]["phase"] == "running" and state["engine"]["restarts"] == 1)
    assert after["engine"]["epoch"] > before["engine"]["epoch"]
    assert after["agent"] == before["agent"]
    assert (running.run_dir / "gate.state").stat().st_ino != inode


def test_killed_agent_comes_back_and_the_engine_does_not_notice(launch: Callable[..., Running]) -> None:
    running = launch()
    before = running.serving()
    os.kill(before["agent"]["pid"], signal.SIGKILL)
    after = running.until(lambda state: state["agent"]["restarts"] == 1)
    assert after["agent"]["pid"] != before["agent"]["pid"]
    assert after["engine"]["pid"] == before["engine"]["pid"]


def test_killed_supervisor_takes_grandchildren_and_memory_with_it(launch: Callable[..., Running]) -> None:
    """Seen with vLLM: engine core and worker lived on after the API server had died with the supervisor."""
    running = launch()
    state = running.serving()
    running.process.kill()
    running.process.wait()
    wait_gone(state["engine"]["pid"], state["agent"]["pid"])
    end = time.monotonic() + 10
    while Path("/dev/shm", running.shm).exists():
        assert time.monotonic() < end
        time.sleep(0.02)  # noqa: TID251 - processes, no event loop
    running.process = again(running)
    assert running.until(lambda now: now["pid"] != state["pid"] and now["engine"]["phase"] == "running")


def again(running: Running) -> subprocess.Popen[bytes]:
    assert running.process.stderr is not None
    running.process.stderr.close()
    return running.spawn()


def test_stop_waits_for_the_end_and_start_begins_anew(launch: Callable[..., Running]) -> None:
    running = launch()
    before = running.serving()
    answer = running.command(cmd="stop_engine", timeout_s=5)
    assert (answer["engine"]["phase"], answer["engine"]["pid"]) == ("stopped", None)
    assert answer["engine"]["reason"] == "stopped on request"
    assert gone(before["engine"]["pid"])
    assert running.command(cmd="stop_engine")["engine"]["phase"] == "stopped"
    running.command(cmd="start_engine")
    after = running.until(lambda state: state["engine"]["phase"] == "running")
    assert after["engine"]["epoch"] > before["engine"]["epoch"]


def test_restart_is_stop_and_start(launch: Callable[..., Running]) -> None:
    running = launch()
    before = running.serving()
    running.command(cmd="restart_engine", timeout_s=5)
    after = running.until(lambda state: state["engine"]["pid"] not in (None, before["engine"]["pid"]))
    assert after["engine"]["restarts"] == 1


def test_engine_that_ignores_sigterm_is_killed(launch: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    running = launch("stubborn", stop_timeout_s=0)
    before = running.serving()
    answer = running.command(cmd="stop_engine", timeout_s=0)
    assert answer["engine"]["phase"] == "stopped"
    assert gone(before["engine"]["pid"])


def test_stop_during_backoff_is_kept(launch: Callable[..., Running]) -> None:
    running = launch("broken")
    running.until(lambda state: state["engine"]["phase"] == "backoff")
    assert running.command(cmd="stop_engine")["engine"]["phase"] == "stopped"
    epoch = running.state()["engine"]["epoch"]
    time.sleep(1.3)  # noqa: TID251 - longer than the first back-off
    assert (running.state()["engine"]["phase"], running.state()["engine"]["epoch"]) == ("stopped", epoch)


def test_reason_of_a_broken_engine_is_in_words(launch: Callable[..., Running]) -> None:
    running = launch("broken")
    state = running.until(lambda state: state["engine"]["phase"] == "backoff")
    assert state["engine"]["reason"] == "exited with code 3; last log line: ValueError: no such model"


def test_engine_that_never_serves_is_cut_off(launch: Callable[..., Running]) -> None:
    running = launch("mute", startup_timeout_s=0.7)
    state = running.until(lambda state: state["engine"]["phase"] == "backoff")
    assert state["engine"]["reason"].startswith("not ready 0.7 s after its start; last log line: ")


def test_engine_was_cut_off_while_its_model_was_downloaded(launch: Callable[..., Running]) -> None:
    """Again and again, from the beginning: the time for a start counts from the end of the download."""
    running = launch("download", startup_timeout_s=0.7)
    state = running.serving()
    assert state["engine"]["restarts"] == 0


def test_download_that_fell_silent_is_cut_off(launch: Callable[..., Running]) -> None:
    running = launch("silent", startup_timeout_s=0.7)
    state = running.until(lambda state: state["engine"]["phase"] == "backoff")
    assert state["engine"]["reason"].startswith("not ready 0.7 s after its download; last log line: ")


def test_second_supervisor_is_refused(launch: Callable[..., Running]) -> None:
    running = launch()
    running.serving()
    second = running.spawn()
    assert second.wait(20) == 2
    assert second.stderr is not None
    assert b"another supervisor runs in" in second.stderr.read()
    second.stderr.close()
    assert running.process.poll() is None


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"", "not a line of JSON"),
        (b"nonsense", "not a line of JSON"),
        (b"[1]", 'an object with a "cmd"'),
        (b'{"cmd": 1}', 'an object with a "cmd"'),
        (b'{"cmd": "explode"}', "unknown command 'explode'"),
        (b'{"cmd": "stop_engine", "timeout_s": -1}', "timeout_s=-1"),
        (b'{"cmd": "stop_engine", "timeout_s": "x"}', "timeout_s='x'"),
        (b'{"cmd": "stop_engine", "timeout_s": true}', "timeout_s=True"),
        (b"[" * 4000, "not a line of JSON"),
    ],
)
def test_bad_commands_are_answered_and_change_nothing(shared: Running, line: bytes, error: str) -> None:
    assert error in shared.line(line)["error"]
    status = shared.command(cmd="status")
    assert status == shared.state()
    assert status["engine"]["phase"] == "running"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("shared"), "good")
    running.serving()
    yield running
    assert running.end() == 0
    assert running.process.stderr is not None
    running.process.stderr.close()
