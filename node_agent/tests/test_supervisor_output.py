"""Output of children that goes to the container instead of files: all of it, in whole lines, and remembered."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from prefixpool_agent.supervisor.output import Relay

PROGRAM = """
import asyncio, signal, sys
from prefixpool_agent.supervisor.plan import AgentPlan
from prefixpool_agent.supervisor.process import Reaper, start
async def run():
    reaper = Reaper()
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, reaper.reap)
    children = [start(AgentPlan(argv=(sys.executable, "-c", code), env={}, log=""), {}, reaper) for code in sys.argv[1:]]
    for child in children:
        await child.exited
        await child.kill_group()
        print(child.reason(), file=sys.stderr)
asyncio.run(run())
"""


def relayed(*children: str) -> tuple[str, list[str]]:
    """What arrives on standard output, and the reasons why the children ended."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, *children], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout, done.stderr.splitlines()


def test_the_reason_of_an_end_has_the_last_line_also_without_log_files() -> None:
    said, reasons = relayed("print('starting'); raise SystemExit('ValueError: no such model')")
    assert said == "starting\nValueError: no such model\n"
    assert reasons == ["exited with code 1; last log line: ValueError: no such model"]


def test_nothing_is_lost_and_lines_of_two_children_stay_whole() -> None:
    code = "for n in range(300): print('{0}' * 25, end='', flush=True); print('{0}' * 25, n, flush=True)"
    said, reasons = relayed(*(code.format(letter) for letter in "ab"))
    assert reasons == [f"exited with code 0; last log line: {letter * 50} 299" for letter in "ab"]
    for letter in "ab":
        assert [line for line in said.splitlines() if letter in line] == [f"{letter * 50} {n}" for n in range(300)]


def test_a_line_without_an_end_is_passed_on_too() -> None:
    said, reasons = relayed("print('x' * 200_000, end='')")
    assert said == "x" * 200_000
    assert reasons[0].startswith("exited with code 0; last log line: xxx")


class HalfAtOnce(io.RawIOBase):
    """A bare file whose writes a signal cuts short."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: Any, /) -> int:
        piece = bytes(data[: len(data) // 2 + 1])
        self.written += piece
        return len(piece)


async def test_ends_of_lines_were_lost_under_pythonunbuffered(monkeypatch: pytest.MonkeyPatch) -> None:
    """There standard output is a bare file, and SIGCHLD comes when a child has written its last words."""
    file = HalfAtOnce()
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=file))
    relay = Relay()
    os.write(relay.write_end, b"a line\nand its end")
    os.close(relay.write_end)
    relay.tail()
    assert file.written == b"a line\nand its end"


def test_a_child_does_not_end_because_nobody_reads() -> None:
    child = "import time\nfor n in range(50): print('line', flush=True); time.sleep(0.001)\nraise SystemExit(7)"
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, child], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        program.stdout.close()
        assert program.stderr.readline() == "exited with code 7; last log line: line\n"


async def test_a_child_that_writes_without_a_pause_kept_the_supervisor_from_all_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    relay, reads = Relay(), 0
    os.close(relay.write_end)

    def read(descriptor: int, size: int) -> bytes:
        nonlocal reads
        reads += 1
        assert reads < 1000, "it never comes back"
        return b"more\n"

    with monkeypatch.context() as patch:
        patch.setattr(os, "read", read)
        assert relay.tail().endswith(b"more\n")
    relay.tail()  # the end: closes
