"""The command line: help that teaches, errors that say what to do, exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from prefixpool_cli import interrupt, main
from prefixpool_cli.errors import CliError

RUN = CliRunner()
COMMAND = (sys.executable, "-m", "prefixpool_cli")


@pytest.mark.parametrize("command", ["up", "demo", "explain", "doctor", "version"])
def test_every_command_explains_itself(command: str) -> None:
    found = RUN.invoke(main.app, [command, "--help"])
    assert found.exit_code == 0
    assert found.output.count("\n") > 4


def test_without_a_command_it_shows_what_there_is() -> None:
    found = RUN.invoke(main.app, [])
    for command in ("up", "demo", "explain", "doctor"):
        assert f"prefixpool {command}" in found.output


def test_version_names_itself_python_and_vllm() -> None:
    found = RUN.invoke(main.app, ["version"])
    assert found.exit_code == 0
    assert [line.split()[0] for line in found.output.splitlines()] == ["prefixpool", "python", "vllm"]


def test_vllm_needs_a_model() -> None:
    assert "model folder is needed" in RUN.invoke(main.app, ["up"]).output
    assert RUN.invoke(main.app, ["demo"]).exit_code == 2


def test_errors_are_a_message_a_hint_and_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise CliError("port 8000 is [taken]", "choose another")

    monkeypatch.setattr("prefixpool_cli.preflight.check", refuse)
    found = RUN.invoke(main.app, ["up", "--engine", "sim"])
    assert found.exit_code == 1
    assert "error: port 8000 is [taken]" in found.output
    assert "choose another" in found.output


def test_an_unknown_arm_is_told_with_those_that_there_are() -> None:
    found = RUN.invoke(main.app, ["demo", "--engine", "sim", "--arm", "psychic"])
    assert found.exit_code == 1
    assert "round_robin, least_load, chwbl, prefix_approximate, prefix" in found.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["up", "--engine", "sim", "--port", "99999"],
        ["up", "--engine", "sim", "--admin-port", "-1"],
        ["up", "--engine", "sim", "--cache-gib", "nan"],
        ["up", "--engine", "sim", "--cache-gib", "inf"],
        ["up", "--engine", "sim", "--device", "gpu"],
        ["plan", "llama-3.1-8b", "--host-gib", "1e300"],
        ["plan", "llama-3.1-8b", "--disk-gib", "nan"],
        ["demo", "--engine", "sim", "--out", "/proc/nowhere"],
        ["up", "--engine", "sim", "--logs", "/proc/nowhere", "--port", "0", "--admin-port", "0"],
        ["up", "--engine", "sim", "--logs", __file__, "--port", "0", "--admin-port", "0"],
    ],
)
def test_arguments_out_of_range_showed_a_traceback(arguments: list[str]) -> None:
    found = RUN.invoke(main.app, arguments)
    assert found.exit_code in (1, 2)
    assert isinstance(found.exception, SystemExit)
    assert "rror" in found.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["up", "--engine", "sim", "--max-model-len", "-1"],
        ["demo", "--engine", "sim", "--requests", "-4"],
        ["demo", "--engine", "sim", "--device-blocks", "-1"],
        ["explain", "--last", "-3"],
        ["explain", "--last", "100000000000000000000"],
    ],
)
def test_counts_below_zero_or_beyond_reason_were_taken_for_others(arguments: list[str]) -> None:
    found = RUN.invoke(main.app, arguments)
    assert found.exit_code == 2
    assert f"Invalid value for '{arguments[-2]}'" in found.output


def test_a_reader_that_went_away_is_told_of_by_the_exit_status_alone() -> None:
    """`prefixpool plan llama-3.1-8b | true`"""
    commands = (["version"], ["--help"], ["plan", "llama-3.1-8b"], ["plan", "llama-3.1-8b", "--json"], ["explain"])
    read, write = os.pipe()
    os.close(read)
    running = [subprocess.Popen([*COMMAND, *one], stdout=write, stderr=subprocess.PIPE) for one in commands]
    os.close(write)
    assert [(one.communicate(timeout=110)[1], one.returncode) for one in running] == [(b"", 1)] * len(commands)


def test_a_folder_that_cannot_be_looked_at_ended_up_in_a_traceback() -> None:
    found = RUN.invoke(main.app, ["up", "--engine", "sim", "x" * 300])
    assert found.exit_code == 1
    assert "File name too long" in found.output


def test_what_the_help_of_spill_refers_to_is_where_it_says() -> None:
    shown = " ".join(re.split(r"[\s│]+", RUN.invoke(main.app, ["demo", "--help"]).output))
    assert shown.index("--spill sends four times") < shown.index("see above")


def test_explain_without_a_router_says_where_it_looked() -> None:
    found = RUN.invoke(main.app, ["explain", "--admin", "http://127.0.0.1:9"])
    assert found.exit_code == 1
    assert "no router answers at http://127.0.0.1:9" in found.output


@pytest.mark.slow
def test_the_demo_on_the_sim_writes_its_report(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    command = ["demo", "--engine", "sim", "--requests", "30", "--arm", "round_robin", "--arm", "prefix", "--out", str(out)]
    ran = subprocess.run([*COMMAND, *command], capture_output=True, text=True, timeout=110)
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    report = json.loads((out / "report.json").read_text())
    missed = [goal["goal"] for goal in report["goals"] if not goal["met"] and not goal["timing"]]
    assert ran.returncode == bool(missed), "so little work need not show all that the whole does"
    assert all(words in ran.stdout for words in missed)
    assert list(report["arms"]) == ["round_robin", "prefix"]
    assert [arm["errors"] for arm in report["arms"].values()] == [0, 0]
    assert report["arms"]["prefix"]["hit_rate"] > 0
    assert report["greedy"] == {
        "compared": 30,
        "equal": 30,
        "near_ties": 0,
        "wrong": 0,
        "steps_wrong": [],
        "differences": [],
    }
    assert "prefix_one_replica" in report["prediction_by_arm"]
    assert (out / "report.html").read_text().startswith("<!doctype html>")
    assert len((out / "samples.jsonl").read_text().splitlines()) == 90
    assert (out / "logs" / "r0-engine.log").exists()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_unicode_got_a_traceback(encoding: str) -> None:
    ran = subprocess.run(
        [*COMMAND, "plan", "llama-3.1-8b"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        timeout=110,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert b"One replica holds" in ran.stdout


def test_a_full_disk_behind_standard_output_showed_a_traceback() -> None:
    """`prefixpool plan llama-3.1-8b > /dev/full`"""
    cases = [("", "version"), ("", "--help"), ("1", "plan llama-3.1-8b")]
    with Path("/dev/full").open("w") as full:
        running = [
            subprocess.Popen(
                [*COMMAND, *words.split()],
                stdout=full,
                stderr=subprocess.PIPE,
                env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
                text=True,
            )
            for unbuffered, words in cases
        ]
        told = [(one.communicate(timeout=110)[1], one.returncode) for one in running]
    line = "error: standard output cannot be written: No space left on device\n"
    assert told == [(line, 1)] * len(cases)


def test_a_full_disk_behind_all_output_is_told_by_the_exit_status_alone() -> None:
    env = {**os.environ, "PYTHONUNBUFFERED": ""}
    with Path("/dev/full").open("w") as full:
        assert subprocess.run([*COMMAND, "version"], stdout=full, stderr=full, env=env, timeout=110).returncode == 1


@pytest.mark.parametrize("command", ["up", "demo"])
def test_ctrl_c_while_modules_were_imported_was_ignored(command: str, tmp_path: Path) -> None:
    """Every moment of the first two seconds: what was imported then may have swallowed the exception."""
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "__init__.py").write_text(SWALLOWING)
    ran = subprocess.Popen(
        [*COMMAND, command, "--engine", "sim"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        text=True,
    )
    assert (ran.communicate(timeout=110), ran.returncode) == (("", ""), 130)


SWALLOWING = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)
except BaseException:
    pass
raise SystemExit("Ctrl-C was ignored")
"""


def test_ctrl_c_behind_the_end_of_a_command_shows_no_traceback() -> None:
    """The event loop gives Python's own handler back."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:

        async def fine() -> bool:
            return True

        assert interrupt.run(fine(), Console(quiet=True))
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
