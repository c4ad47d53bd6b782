"""Shared memory of a dead engine."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest

from prefixpool_agent import shm
from prefixpool_agent.supervisor.log_files import trim
from prefixpool_agent.worker import look_at_host

HOLDER = (
    "import mmap, os, sys\n"
    "f = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR, 0o600); os.ftruncate(f, 4096); m = mmap.mmap(f, 4096)\n"
    "print('mapped', flush=True); sys.stdin.read()"
)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "psm_1")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"mapped\n"
    with process:
        yield process
        process.kill()


def test_files_are_found_in_the_maps_of_the_group(tmp_path: Path, holder: subprocess.Popen[bytes]) -> None:
    assert shm.group_members(holder.pid) == [holder.pid]
    assert shm.mapped_files([holder.pid], shm=tmp_path) == {"psm_1"}


def test_a_process_whose_name_is_cut_within_a_character_ended_the_supervisor(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_bytes("7 (schlü".encode()[:-1] + b") S 1 7 7 0 -1")
    assert shm.group_members(7, proc=tmp_path) == [7]


def test_file_that_somebody_still_maps_is_kept(tmp_path: Path, holder: subprocess.Popen[bytes]) -> None:
    assert shm.remove(["psm_1"], shm=tmp_path) == []
    assert (tmp_path / "psm_1").exists()
    holder.kill()
    holder.wait()
    assert shm.remove(["psm_1"], shm=tmp_path) == ["psm_1"]
    assert not (tmp_path / "psm_1").exists()


def test_only_recorded_names_are_removed(tmp_path: Path) -> None:
    (tmp_path / "psm_other").touch()
    assert shm.remove([], shm=tmp_path) == []
    assert shm.remove(["psm_gone"], shm=tmp_path) == []
    assert (tmp_path / "psm_other").exists()


def test_unlinked_files_are_not_reported(tmp_path: Path, holder: subprocess.Popen[bytes]) -> None:
    (tmp_path / "psm_1").unlink()
    assert shm.mapped_files([holder.pid], shm=tmp_path) == set()


def test_processes_that_ended_meanwhile_are_no_error(tmp_path: Path) -> None:
    assert shm.mapped_files([2**22 + 1]) == set()
    assert shm.group_members(2**22 + 1) == []
    assert os.getpid() in shm.group_members(os.getpgrp())


def test_large_log_is_cut_to_its_end_and_still_written_to(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("a") as writer:
        writer.write("".join(f"line {n}\n" for n in range(1000)))
        writer.flush()
        trim(path, max_bytes=100, keep_bytes=50)
        writer.write("after\n")
    lines = path.read_text().splitlines()
    assert lines[-2:] == ["line 999", "after"]
    assert len(lines) < 10
    trim(path, max_bytes=10_000)
    assert path.read_text().splitlines() == lines
    trim(tmp_path / "absent")


def test_after_a_container_was_killed_its_shared_memory_kept_the_next_one_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker refused settings for which too little was free, before the supervisor removed what was left over."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    left = shm.SHM / f"prefixpool-test-{uuid4().hex}"
    state = {"pid": 1, "engine": {"pid": None, "shm": [left.name, "gone"]}}
    (tmp_path / "supervisor.json").write_text(json.dumps(state))
    try:
        left.write_bytes(bytes(1 << 20))
        assert look_at_host("model", str(tmp_path)).shm_bytes == 1_000_000 + (1 << 20)
        with left.open("r+b") as file, mmap.mmap(file.fileno(), 0):
            assert look_at_host("model", str(tmp_path)).shm_bytes == 1_000_000, "somebody lives"
    finally:
        left.unlink()
    assert look_at_host("model", str(tmp_path / "new")).shm_bytes == 1_000_000
