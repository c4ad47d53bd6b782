"""The program that stands in the engine's place until the model is here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prefixpool.wire import Download
from prefixpool_agent.download import state
from prefixpool_agent.download.__main__ import Teller, engine_argv, words
from prefixpool_agent.download.pace import STALLED
from prefixpool_testing.fake_hub import COMMIT, FakeHub

ENGINE = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ.get('HF_HUB_OFFLINE')]))"
GIB = 1 << 30


@pytest.mark.parametrize(("flags", "offline"), [(["--then-offline"], "1"), ([], None)])
def test_it_becomes_the_engine_with_the_folder_as_its_model(tmp_path: Path, flags: list[str], offline: str | None) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    with FakeHub(model, "org/m", branch="v1") as hub:
        argv = ["--model", "org/m", "--revision", "v1", "--run-dir", str(tmp_path), *flags]
        engine = ["--", sys.executable, "-c", ENGINE, "--model", "org/m", "--port", "1"]
        env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache")}
        done = subprocess.run(
            [sys.executable, "-m", "prefixpool_agent.download", *argv, *engine],
            env=env, capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
    *log, said = done.stdout.splitlines()
    seen = state.read(tmp_path)
    assert seen is not None
    assert json.loads(said) == [["--model", seen.folder, "--port", "1"], offline]
    assert Path(seen.folder).name == COMMIT
    assert log[0] == "downloading org/m: size not known yet"
    assert log[-1] == "downloading org/m: 100 %, 0 MiB of 0 MiB"


def test_a_download_that_hangs_begins_anew_in_a_fresh_process(tmp_path: Path) -> None:
    """Threads that hang, and the locks that they hold, end with the old one."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(os.urandom(200_000))
    hasty = (
        "import prefixpool_agent.download.pace as pace; pace.STALLED_S, pace.STUCK_S = 0.2, 1.5\n"
        "import prefixpool_agent.download.fetching as fetching; fetching._LOOK_S = 0.05\n"
        "from prefixpool_agent.download.__main__ import main; main()"
    )
    with FakeHub(model, "org/m") as hub:
        argv = ["--model", "org/m", "--revision", "main", "--run-dir", str(tmp_path), "--then-offline"]
        engine = ["--", sys.executable, "-c", ENGINE, "--model", "org/m"]
        env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache")}
        hub.hold(at_bytes=65_536)
        log: list[str] = []
        program = [sys.executable, "-c", hasty, *argv, *engine]
        with subprocess.Popen(program, env=env, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or ():
                log.append(line.strip())
                if len([one for one in log if STALLED in one]) == 2:  # the second one says so as well, until bytes come
                    hub.release()
    assert process.returncode == 0
    assert hub.downloads.count("model.safetensors") == 2
    argv_of_engine, offline = json.loads(log[-1])
    assert (Path(argv_of_engine[1]) / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert offline == "1"
    assert log[-2] == "downloading org/m: 100 %, 0 MiB of 0 MiB"


def test_the_log_says_each_thing_once_and_the_file_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    teller = Teller(tmp_path)
    for done in range(0, 100, 2):
        teller.tell(Download(model="org/m", done_bytes=done * GIB, total_bytes=100 * GIB))
    assert len(capsys.readouterr().out.splitlines()) == 20
    seen = state.read(tmp_path)
    assert seen is not None
    assert (seen.download.done_bytes, seen.folder) == (98 * GIB, "")


def test_words_of_a_problem() -> None:
    told = words(Download(model="org/m", done_bytes=5, total_bytes=9, problem="no space is left"))
    assert told == "downloading org/m does not go on: no space is left; it is tried again"


def test_only_the_model_of_an_engine_changes() -> None:
    argv = ["py", "-m", "vllm", "--model", "org/m", "--served-model-name", "org/m"]
    assert engine_argv(argv, Path("/c/s")) == ["py", "-m", "vllm", "--model", "/c/s", "--served-model-name", "org/m"]
