"""The parts of a local pool that need no engine: command lines, files, ports, preflight."""

import errno
import json
import os
import signal
import socket
import stat
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from prefixpool.api.engine import EngineKind
from prefixpool.errors import SettingsError
from prefixpool.wire import Download
from prefixpool_agent.settings import Device
from prefixpool_cli import pool_files, ports, preflight
from prefixpool_cli.errors import CliError, PoolError
from prefixpool_cli.pool_process import Process
from prefixpool_cli.pool_spec import MemberRow, PoolSpec, Ports, gpu_env, members_json, router_argv, worker_argv
from prefixpool_cli.pool_watch import download_words

SPEC = PoolSpec(model="/models/tiny", engine=EngineKind.SIM, policy="chwbl", device_blocks=9, dev_mode=True)


def test_a_worker_gets_what_the_spec_says() -> None:
    argv = worker_argv(SPEC, "local-0", Path("/run/r0"), Path("/run/engine.key"), Ports(1, 2), "")
    assert argv[:3] == [sys.executable, "-m", "prefixpool_agent.worker"]
    assert {"--replica=local-0", "--engine=sim", "--device-blocks=9", "--dev-mode=true", "--served-model-name=tiny"} <= set(
        argv
    )
    absent = ("--cpu-cores", "--block-tokens", "--engine-args", "--startup-timeout-s")
    assert not any(flag.startswith(absent) for flag in argv)


def test_engine_arguments_that_look_like_flags_stay_one_argument() -> None:
    spec = msgspec.structs.replace(SPEC, engine_args="--time-scale 0.1")
    argv = worker_argv(spec, "local-0", Path("/r"), Path("/k"), Ports(1, 2), "0-1")
    assert "--engine-args=--time-scale 0.1" in argv
    assert "--cpu-cores=0-1" in argv


def test_a_router_reads_the_member_file_and_its_policy() -> None:
    argv = router_argv(SPEC, "router-0", Path("/run/members.json"), Path("/run/engine.key"), (8000, 8001))
    assert {"--members=/run/members.json", "--policy=chwbl", "--port=8000", "--admin-port=8001"} <= set(argv)


def test_members_without_agents_are_plain_backends() -> None:
    rows = [MemberRow("local-0", "http://e", "http://a"), MemberRow("local-1", "http://f", "http://b", "terminating")]
    told = json.loads(members_json(rows, agents=True))
    assert told[0] == {"name": "local-0", "engine": "http://e", "agent": "http://a", "state": "ready"}
    assert told[1]["state"] == "terminating"
    assert [row["agent"] for row in json.loads(members_json(rows, agents=False))] == [None, None]


def test_a_download_is_told_by_how_far_it_is_or_by_what_stops_it() -> None:
    download = Download(model="org/m", done_bytes=1 << 30, total_bytes=4 << 30)
    assert download_words(download) == "downloading the model: 25 %, 1.0 GiB of 4.0 GiB"
    assert download_words(msgspec.structs.replace(download, problem="no space is left")) == "no space is left"


def test_the_run_directory_is_private_and_short() -> None:
    made = pool_files.make_run_root(["/tmp"])
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o700
    assert len(os.fsencode(made.path / "r99" / "supervisor.sock")) < 107
    made.remove()
    with pytest.raises(PoolError, match="too long a path"):
        pool_files.make_run_root(["/" + "x" * 100])


def test_the_engine_key_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    key = pool_files.make_engine_key(tmp_path / "engine.key")
    assert (tmp_path / "engine.key").read_text() == key + "\n"
    assert stat.S_IMODE((tmp_path / "engine.key").stat().st_mode) == 0o600
    assert len(key) >= 32


def test_tail_shows_the_end_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("".join(f"line {i}\n" for i in range(10_000)))
    assert pool_files.tail(log, lines=2) == "line 9998\nline 9999"
    assert pool_files.tail(tmp_path / "none.log") == ""


def test_logs_are_kept_under_the_name_of_their_place(tmp_path: Path) -> None:
    (tmp_path / "run" / "r0").mkdir(parents=True)
    (tmp_path / "run" / "r0" / "engine.log").write_text("x")
    pool_files.keep_logs(tmp_path / "run", tmp_path / "kept")
    assert (tmp_path / "kept" / "r0-engine.log").read_text() == "x"


def test_a_directory_with_almost_no_room_ended_the_pool_later_in_one_of_its_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parent = tempfile.mkdtemp(dir="/tmp")  # its path is short
    root = pool_files.make_run_root([parent])
    (root.path / "r0").mkdir()
    os.close(root.lock)  # as if its pool had been killed
    room = iter([pool_files.LEAST_ROOM_BYTES - 1, pool_files.LEAST_ROOM_BYTES])

    def usage(folder: str) -> SimpleNamespace:
        assert not os.listdir(parent), "what killed pools left goes first"
        return SimpleNamespace(free=next(room))

    monkeypatch.setattr("shutil.disk_usage", usage)
    with pytest.raises(PoolError, match=r"is almost full: 3\.9 MiB are free, a pool needs 4") as caught:
        pool_files.make_run_root([parent])
    assert "TMPDIR" in caught.value.hint
    assert not os.listdir(parent)
    pool_files.make_run_root([parent]).remove()
    os.rmdir(parent)


def test_no_directory_for_temporary_files_showed_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.gettempdir", none)
    with pytest.raises(PoolError, match="can be written") as caught:
        pool_files.make_run_root()
    assert "TMPDIR" in caught.value.hint


async def test_a_full_disk_below_a_pools_directory_showed_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.open", full)
    monkeypatch.setattr("os.mkdir", full)
    monkeypatch.setattr("io.open", full)
    words = "cannot be written: No space left on device"
    with pytest.raises(PoolError, match=words):
        pool_files.make_run_root(("/tmp",))
    with pytest.raises(PoolError, match=words):
        pool_files.write_private(tmp_path / "members.json", b"[]")
    with pytest.raises(PoolError, match=words):
        pool_files.make_run_dir(tmp_path / "r0")
    with pytest.raises(PoolError, match=r"local-0 could not be started: .*No space left on device"):
        await Process.start("local-0", ["true"], tmp_path / "log", {})


def test_logs_that_could_not_be_kept_ended_up_in_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "worker.log").write_text("words")
    taken = tmp_path / "file"
    taken.touch()
    for keep in (lambda: pool_files.make_logs_folder(taken), lambda: pool_files.keep_logs(tmp_path, taken)):
        with pytest.raises(PoolError, match=r"logs cannot be kept in .*/file: File exists"):
            keep()


async def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    code = "import signal,sys,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    process = await Process.start("stubborn", [sys.executable, "-c", code], tmp_path / "log", {})
    while "up" not in pool_files.tail(tmp_path / "log"):
        assert not await process.wait(0.02)
    assert await process.stop(0.05) is False
    assert process.returncode == -signal.SIGKILL


async def test_a_program_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(PoolError, match="router-0 could not be started"):
        await Process.start("router-0", ["/no/such/program"], tmp_path / "log", {})


def test_a_taken_port_is_told_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CliError, match=f"port {port} is taken"):
            preflight.check(msgspec.structs.replace(SPEC, port=port))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"host": "192.0.2.1"}, "is no address of this machine"),
        ({"port": 18_055, "admin_port": 18_055}, "cannot be both"),
        ({"policy": "psychic"}, "accepted: prefix"),
    ],
)
def test_engines_were_loaded_before_the_router_refused_its_arguments(change: dict[str, object], message: str) -> None:
    with pytest.raises((CliError, SettingsError), match=message):
        preflight.check(msgspec.structs.replace(SPEC, **change))


def test_a_free_port_of_an_ipv6_address_was_told_to_be_taken() -> None:
    if not socket.has_ipv6 or not ports.is_local("::1"):
        pytest.skip("no IPv6 here")
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not ports.port_is_free("::1", port)
    assert ports.port_is_free("::1", port)


@pytest.mark.parametrize(
    ("make", "message"),
    [(lambda _: None, "does not exist"), (lambda p: p.mkdir(), "no config.json"),
     (lambda p: (p.mkdir(), (p / "config.json").write_text("{}")), "no weights")],
)  # fmt: skip
def test_a_folder_that_is_no_model_is_told(tmp_path: Path, make: object, message: str) -> None:
    folder = tmp_path / "model"
    make(folder)  # type: ignore[operator]  # a callable, from the parameters
    with pytest.raises(CliError, match=message):
        preflight.check_model(str(folder))


def test_names_of_models_elsewhere_are_left_to_the_engine() -> None:
    preflight.check_model("some-org/some-model")
    with pytest.raises(CliError, match="no model folder"):
        preflight.check_model("some-model")


def test_too_little_memory_is_told_with_figures(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")
    spec = PoolSpec(model=str(tmp_path), replicas=3, device=Device.CPU)
    preflight.check_memory(spec, 64 << 30)
    preflight.check_memory(spec, 0)
    with pytest.raises(CliError, match=r"3 replicas need about 6\.\d GiB, 2\.0 GiB"):
        preflight.check_memory(spec, 2 << 30)


def test_missing_vllm_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(CliError) as caught:
        preflight.check_vllm()
    assert "--engine sim" in caught.value.hint


def test_every_replica_has_a_gpu_of_its_own() -> None:
    spec = PoolSpec(model="m", device=Device.CUDA, gpus=("3", "5"))
    assert [gpu_env(spec, ordinal) for ordinal in range(2)] == [{"CUDA_VISIBLE_DEVICES": name} for name in ("3", "5")]
    assert gpu_env(SPEC, 0) == {}
    assert preflight.gpus({"CUDA_VISIBLE_DEVICES": "3,5"}) == ("3", "5")
    assert preflight.gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()


def test_too_few_gpus_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixpool_cli.preflight.check_vllm", lambda: None)
    spec = PoolSpec(model="some-org/some-model", device=Device.CUDA, gpus=("0",), replicas=2)
    with pytest.raises(CliError, match="2 replicas need a GPU each, 1 are here"):
        preflight.check(spec)


def test_available_memory_is_read_from_the_kernel(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 10 kB\nMemAvailable:  7 kB\n")
    assert preflight.available_memory(meminfo) == 7 * 1024
    assert preflight.available_memory(tmp_path / "none") == 0
