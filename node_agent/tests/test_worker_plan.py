"""From the worker's flags to what the supervisor runs."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from prefixpool.errors import SettingsError
from prefixpool.settings import parse
from prefixpool_agent import worker
from prefixpool_agent.engines.base import Host
from prefixpool_agent.settings import AGENT_PREFIX, AgentSettings
from prefixpool_agent.supervisor.plan import PlanError, read_plan

HOST = Host(python="/py", cores=(0,), weight_bytes=1)


def flags(tmp_path: Path, *more: str) -> list[str]:
    key = tmp_path / "key"
    key.write_text("k\n")
    own = ["--replica", "p-0", "--run-dir", str(tmp_path / "r"), "--model", "/m/smol", "--engine-key-file", str(key)]
    return [*own, "--device", "cpu", *more]


def test_agent_reads_back_exactly_what_the_worker_derived(tmp_path: Path) -> None:
    tiers = ("--host-kv-bytes", "1024", "--disk-kv-dir", "/d", "--disk-kv-bytes", "2048")
    settings = worker.read_settings(flags(tmp_path, "--engine-port", "9000", "--max-inflight", "7", *tiers), {})
    plan = worker.worker_plan(settings, HOST)
    agent = parse(AgentSettings, [], plan.agent.env, prefix=AGENT_PREFIX, parser=argparse.ArgumentParser())
    assert agent == worker.agent_settings(settings, worker.engine_spec(settings, HOST))
    assert (agent.engine_url, agent.max_inflight, agent.served_model_name) == ("http://127.0.0.1:9000", 7, "smol")
    assert (agent.host_kv_bytes, agent.disk_kv_bytes) == (1024, 2048)


def test_plan_survives_the_file(tmp_path: Path) -> None:
    plan = worker.worker_plan(worker.read_settings(flags(tmp_path), {}), HOST)
    path = worker._write_plan(plan)
    assert read_plan(path) == plan
    assert path.stat().st_mode & 0o777 == 0o600
    assert plan.run_dir.stat().st_mode & 0o777 == 0o700


def test_words_behind_two_dashes_go_to_the_engine(tmp_path: Path) -> None:
    argv = flags(tmp_path, "--engine-args", "--seed 3", "--", "--hf-overrides", '{"a": 1}')
    plan = worker.worker_plan(worker.read_settings(argv, {}), HOST)
    assert plan.engine.argv[-4:] == ("--seed", "3", "--hf-overrides", '{"a": 1}')


def test_unbalanced_quotes_are_refused_where_the_settings_are_read(tmp_path: Path) -> None:
    argv = flags(tmp_path, "--engine-args", "--chat-template 'a b", "--", "--other 'quote")
    with pytest.raises(SettingsError, match=r"--engine-args=.*a b.*: No closing quotation; quote as in a shell"):
        worker.read_settings(argv, {})


def test_a_run_directory_of_somebody_else_is_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(worker, "make_private", forbidden)
    with pytest.raises(SettingsError, match=r"--run-dir=.*Operation not permitted.*a directory below it"):
        worker._write_plan(worker.worker_plan(worker.read_settings(flags(tmp_path), {}), HOST))


def test_a_run_directory_below_a_volume_that_a_group_shares_is_private(tmp_path: Path) -> None:
    volume = tmp_path / "run"
    volume.mkdir()
    volume.chmod(0o2777)  # an emptyDir with fsGroup
    settings = worker.read_settings([*flags(tmp_path), "--run-dir", str(volume / "w")], {})
    worker._check_files(settings)
    plan = worker.worker_plan(settings, HOST)
    worker._write_plan(plan)
    assert plan.run_dir.stat().st_mode & 0o777 == 0o700


def test_environment_may_replace_flags(tmp_path: Path) -> None:
    assert worker.read_settings(flags(tmp_path), {"PREFIXPOOL_WORKER_MAX_NUM_SEQS": "5"}).max_num_seqs == 5


def test_engine_and_agent_of_a_pod_listen_on_ipv4_where_there_is_no_ipv6(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worker.read_settings(flags(tmp_path, "--host", "::"), {}).host == "::"
    monkeypatch.setattr(worker, "available", lambda host: "0.0.0.0" if host == "::" else host)
    settings = worker.read_settings(flags(tmp_path, "--host", "::"), {})
    plan = worker.worker_plan(settings, HOST)
    assert plan.engine.argv[plan.engine.argv.index("--host") + 1] == "0.0.0.0"
    assert plan.agent.env["PREFIXPOOL_AGENT_HOST"] == "0.0.0.0"


def test_one_port_for_engine_and_agent_was_tried_for_ever(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="port 9000 cannot be both --engine-port and --agent-port"):
        worker.read_settings(flags(tmp_path, "--engine-port", "9000", "--agent-port", "9000"), {})


def test_long_run_directory_is_refused_before_anything_starts(tmp_path: Path) -> None:
    settings = worker.read_settings([*flags(tmp_path), "--run-dir", "/" + "x" * 100], {})
    with pytest.raises(SettingsError, match="too long for unix sockets"):
        worker._check_files(settings)


def test_missing_or_empty_key_is_refused(tmp_path: Path) -> None:
    settings = worker.read_settings(flags(tmp_path), {})
    (tmp_path / "key").write_text("\n")
    with pytest.raises(SettingsError, match="no engine key in it"):
        worker._check_files(settings)
    (tmp_path / "key").unlink()
    with pytest.raises(SettingsError, match="No such file"):
        worker._check_files(settings)


def test_output_goes_to_the_container_if_files_are_not_wanted(tmp_path: Path) -> None:
    plan = worker.worker_plan(worker.read_settings(flags(tmp_path, "--log-files", "false"), {}), HOST)
    assert (plan.engine.log, plan.agent.log) == ("", "")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"run_dir": "/r", "engine": {"argv": []}, "agent": {}}', '{"run_dir": 1}']
)
def test_broken_plans_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "worker.json").write_text(text)
    with pytest.raises(PlanError, match=r"worker\.json"):
        read_plan(tmp_path / "worker.json")


@pytest.mark.parametrize("name", ["a b", "a/../b", "-a", "a\n", "", "x" * 254])
def test_a_worker_started_under_a_name_that_every_router_refuses(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match="replica"):
        worker.read_settings(flags(tmp_path, f"--replica={name}"), {})


def test_a_run_directory_like_tmp_was_closed_to_everybody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = tmp_path / "r"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "somebody's").touch()
    monkeypatch.setattr("sys.argv", ["prefixpool-worker", *flags(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        worker.main()
    assert "others keep files there" in capsys.readouterr().err
    assert shared.stat().st_mode & 0o7777 == 0o1777


@pytest.mark.parametrize("files", [[], ["worker.json", "engine.log"]])
def test_a_mounted_volume_may_be_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str]
) -> None:
    volume = tmp_path / "r"
    volume.mkdir()
    volume.chmod(0o1777)
    for file in files:
        (volume / file).touch()
    started: list[list[str]] = []
    monkeypatch.setattr("sys.argv", ["prefixpool-worker", *flags(tmp_path)])
    monkeypatch.setattr("os.execv", lambda _, argv: started.append(argv))
    worker.main()
    assert started[0][-1] == str(volume / "worker.json")
    assert volume.stat().st_mode & 0o7777 == 0o700


@pytest.mark.parametrize(
    ("module", "words", "says"),
    [
        ("worker", ["--help"], ["prefixpool-worker drain", "prefixpool-router --replica", "PREFIXPOOL_WORKER_RUN_DIR"]),
        ("worker", ["drain", "--help"], ["preStop hook", "PREFIXPOOL_WORKER_DRAIN_TIMEOUT_S"]),
        ("main", ["--help"], ["prefixpool-agent --replica", "curl localhost:8101/readyz", "PREFIXPOOL_AGENT_RUN_DIR"]),
    ],
)
def test_help_teaches(module: str, words: list[str], says: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"prefixpool_agent.{module}", *words], capture_output=True, text=True, check=True
    )
    for each in says:
        assert each in done.stdout
