"""Directories of programs that were killed go with the next start; those of living ones, and of others, stay."""

from __future__ import annotations

import errno
import os
import select
import signal
import stat
import sys
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from prefixpool import private_directory

PREFIX = "prefixpool-test-"
OWNER = """
import subprocess, sys
from prefixpool import private_directory
made = private_directory.make(sys.argv[1], sys.argv[2])
child = subprocess.Popen(["sleep", "60"], pass_fds=[made.lock]) if sys.argv[3] == "hand on" else None
print(made.path, child.pid if child else 0, flush=True)
sys.stdin.read()
"""


def start(folder: Path, words: str = "") -> tuple[Popen[str], Path, int]:
    owner = Popen([sys.executable, "-c", OWNER, str(folder), PREFIX, words], stdin=PIPE, stdout=PIPE, text=True)
    assert owner.stdout is not None
    path, child = owner.stdout.readline().split()
    return owner, Path(path), int(child)


def test_a_directory_is_private_and_goes_with_its_owner(tmp_path: Path) -> None:
    made = private_directory.make(tmp_path, PREFIX)
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o700
    (made.path / "below").mkdir()
    made.remove()
    assert list(tmp_path.iterdir()) == []


def test_directories_of_killed_programs_were_left_for_ever(tmp_path: Path) -> None:
    owner, path, _ = start(tmp_path)
    with owner:
        private_directory.remove_abandoned(tmp_path, PREFIX)
        assert path.exists(), "its owner lives"
        owner.send_signal(signal.SIGKILL)
    made = private_directory.make(tmp_path, PREFIX)
    assert list(tmp_path.iterdir()) == [made.path]
    made.remove()


def test_a_directory_that_could_not_be_removed_at_once_was_left_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = private_directory.make(tmp_path, PREFIX)
    for name in ("another", "busy", "third"):
        (made.path / name).mkdir()
    rmdir = os.rmdir

    def refuse(path: str | Path, **at: int | None) -> None:
        if Path(path).name == "busy":
            raise OSError(errno.EBUSY, "a mount")
        rmdir(path, **at)

    with monkeypatch.context() as mounted:
        mounted.setattr(os, "rmdir", refuse)
        with pytest.raises(OSError, match="busy"):
            made.remove()
    assert {entry.name for entry in made.path.iterdir()} == {"busy", "owner"}, "the rest is gone"
    private_directory.remove_abandoned(tmp_path, PREFIX)
    assert list(tmp_path.iterdir()) == []


def test_a_child_that_still_needs_the_directory_keeps_it(tmp_path: Path) -> None:
    owner, path, child = start(tmp_path, "hand on")
    with owner:
        owner.send_signal(signal.SIGKILL)
    private_directory.remove_abandoned(tmp_path, PREFIX)
    assert path.exists()
    ended = os.pidfd_open(child)
    os.kill(child, signal.SIGKILL)
    signal_of_the_end(ended)
    private_directory.remove_abandoned(tmp_path, PREFIX)
    assert not path.exists()


def signal_of_the_end(pidfd: int) -> None:
    """Its files are closed before a pidfd is readable."""
    with os.fdopen(pidfd) as end:
        assert select.select([end], [], [], 10)[0]


def test_what_was_not_made_here_is_left_alone(tmp_path: Path) -> None:
    names = (f"{PREFIX}12345678", f"{PREFIX}abcdefgh")
    (tmp_path / names[0]).mkdir()
    (tmp_path / names[1]).write_text("a file")
    (tmp_path / f"{PREFIX}longer-than-eight").mkdir()
    (tmp_path / f"{PREFIX}longer-than-eight" / "owner").touch()
    private_directory.remove_abandoned(tmp_path, PREFIX)
    assert len(list(tmp_path.iterdir())) == 3
