"""gate.state: fence and counts shared by processes."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from prefixpool_agent.gate_state import MAGIC, SIZE, SLOTS, GateState, GateStateError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    GateState.create(tmp_path / "gate.state")
    return tmp_path / "gate.state"


def test_layout_is_the_one_of_the_architecture(path: Path) -> None:
    with GateState(path) as state:
        slot = state.claim(os.getpid())
        slot.enter()
        slot.enter()
        slot.leave()
        slot.admitted()
        state.fence(True)
        data = path.read_bytes()
    assert len(data) == SIZE == 4096
    assert data[:8] == MAGIC == b"PPGATE01"
    assert data[8] == 1
    assert struct.unpack_from("<IIQ", data, 16) == (os.getpid(), 1, 1)
    assert 16 + SLOTS * 16 <= SIZE


def test_counts_of_two_mappings_add_up(path: Path) -> None:
    with GateState(path) as one, GateState(path) as two:
        a, b = one.claim(os.getpid()), two.claim(os.getppid())
        a.enter()
        b.enter()
        b.enter()
        assert one.inflight() == two.inflight() == 3
        assert sorted(one.pids()) == sorted([os.getpid(), os.getppid()])
        b.release()
        assert one.inflight() == 1


def test_fence_is_seen_by_all(path: Path) -> None:
    with GateState(path) as one, GateState(path) as two:
        assert not two.fenced
        one.fence(True)
        assert two.fenced
        two.fence(False)
        assert not one.fenced


def test_slot_of_a_dead_process_is_freed_with_its_requests(path: Path) -> None:
    child = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    dead = int(child.stdout)
    with GateState(path) as state:
        slot = state.claim(dead)
        slot.enter()
        slot.enter()
        assert state.inflight() == 2
        assert state.reap() == 2
        assert state.inflight() == 0
        assert state.pids() == []


def test_leave_never_wraps_below_zero(path: Path) -> None:
    with GateState(path) as state:
        slot = state.claim(os.getpid())
        slot.leave()
        assert state.inflight() == 0


def test_all_slots_taken_by_the_living_is_an_error(path: Path) -> None:
    with GateState(path) as state:
        for _ in range(SLOTS):
            state.claim(os.getpid())
        with pytest.raises(GateStateError, match="254 slots"):
            state.claim(os.getpid())


def test_fresh_file_does_not_disturb_those_who_map_the_old_one(path: Path) -> None:
    with GateState(path) as old:
        old.claim(os.getpid()).enter()
        old.fence(True)
        GateState.create(path)
        with GateState(path) as fresh:
            assert fresh.inflight() == 0
            assert not fresh.fenced
        assert old.inflight() == 1


@pytest.mark.parametrize("content", [b"", b"x" * SIZE, MAGIC])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(GateStateError, match="not a gate state"):
        GateState(path)
    with pytest.raises(GateStateError, match="No such file"):
        GateState(tmp_path / "absent")


def test_counts_survive_concurrent_processes(path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from prefixpool_agent.gate_state import GateState\n"
        "slot = GateState(Path(sys.argv[1])).claim(os.getpid())\n"
        "for _ in range(20000): slot.enter(); slot.admitted(); slot.leave()\n"
        "slot.enter(); print('done', flush=True); sys.stdin.read()"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    with GateState(path) as state:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == b"done\n"
        assert state.inflight() == 3
        assert state.total() == 60000
        for child in children:
            child.communicate(timeout=10)
        assert state.reap() == 3
