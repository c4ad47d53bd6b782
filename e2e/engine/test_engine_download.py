"""Real vLLM with a model from a Hub: replicas that share a cache download it once, and start again without the Hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import msgspec
import pytest

from prefixpool.wire import Info, Mode, State
from prefixpool_cli.claims import Claims
from prefixpool_cli.pool_files import tail
from prefixpool_cli.ports import claim_ports
from prefixpool_testing.fake_hub import FakeHub

pytestmark = [pytest.mark.engine, pytest.mark.timeout(2400)]

MODEL = "org/smol"
KEY = "engine-key-of-the-tests"
OPTIONS = (
    *("--device", "cpu", "--enforce-eager", "true", "--block-tokens", "32", "--max-model-len", "512"),
    *("--kv-cache-bytes", str(64 << 20), "--served-model-name", "smol"),
)
T = TypeVar("T")


class Worker:
    """A whole worker, agent included, that is told the model's name and nothing else of it."""

    def __init__(self, run_dir: Path, number: int) -> None:
        self.run_dir = run_dir
        self.name = f"smol-{number}"
        self._claims = Claims()
        self.engine_port, self.agent_port = claim_ports(self._claims, 2)
        (run_dir / "key").write_text(KEY)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, **env: str) -> None:
        argv = [
            *(sys.executable, "-m", "prefixpool_agent.worker", "--replica", self.name, "--run-dir", str(self.run_dir / "r")),
            *("--model", MODEL, "--engine-key-file", str(self.run_dir / "key"), "--engine-port", str(self.engine_port)),
            *("--agent-port", str(self.agent_port), *OPTIONS),
        ]
        self.process = subprocess.Popen(argv, env={**os.environ, **env})

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(60)

    def info(self) -> Info | None:
        """None: the agent does not answer yet."""
        with suppress(OSError):
            return msgspec.json.decode(ask(f"http://127.0.0.1:{self.agent_port}/info"), type=Info)
        return None

    def until(self, what: Callable[[Info], T | None], within_s: float = 900) -> T:
        end = time.monotonic() + within_s
        while True:
            info = self.info()
            if info is not None and (found := what(info)):
                return found
            assert time.monotonic() < end, f"{info}\n{tail(self.run_dir / 'r/engine.log')}"
            time.sleep(0.1)  # noqa: TID251 - processes, no event loop

    def says(self, prompt: str) -> str:
        body = {"model": "smol", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        answer = ask(f"http://127.0.0.1:{self.engine_port}/v1/completions", json.dumps(body).encode())
        return str(json.loads(answer)["choices"][0]["text"])


def ask(url: str, body: bytes | None = None) -> bytes:
    """Raises OSError."""
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
        return bytes(answer.read())


@contextmanager
def workers(count: int) -> Iterator[list[Worker]]:
    with ExitStack() as stack:
        found = [Worker(Path(stack.enter_context(TemporaryDirectory(prefix="pp"))), number) for number in range(count)]
        for one in found:
            stack.callback(one.stop)
        yield found


def test_replicas_that_share_a_cache_download_once_and_start_again_without_the_hub(model: str, tmp_path: Path) -> None:
    """From a Hub that refuses at first, which is told and is no failed start."""
    with FakeHub(Path(model), MODEL) as hub, workers(2) as replicas:
        env = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_TOKEN": ""}
        hub.refuse(401)
        for one in replicas:
            one.start(**env)
        for one in replicas:
            assert "needs a token" in one.until(lambda info: info.download.problem if info.download else "")
        hub.hold(at_bytes=100 << 20)
        hub.refuse(0)
        for one in replicas:
            seen = one.until(lambda info: info.download if info.download and info.download.done_bytes > 50 << 20 else None)
            assert seen.total_bytes == sum(path.stat().st_size for path in hub.files.values())
            assert seen.done_bytes < seen.total_bytes
            assert seen.problem == ""
        hub.release()
        for one in replicas:
            one.until(lambda info: info.download is None)
        assert sorted(hub.downloads) == sorted(hub.files), "each file once"

        hub.close()
        replicas[1].stop()
        replicas[1].start(**env)
        for one in replicas:
            ready = one.until(lambda info: info if info.state is State.READY else None)
            assert (ready.download, ready.mode, ready.restarts) == (None, Mode.PRECISE, 0)
        answers = [one.says("The capital of France is") for one in replicas]
        assert answers[0] == answers[1]
