"""Shared-memory files of an engine: seen while it lives, removed when it is dead.

vLLM leaves files in /dev/shm when it is killed, and some even when it ends well (vllm_offload_*.mmap). They count as memory
until somebody unlinks them. Which belong to an engine is read from the maps of its process group while it lives: names say
nothing (psm_1a2b3c4d may be anybody's). Standard library only: the supervisor imports it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

SHM: Final = Path("/dev/shm")
PROC: Final = Path("/proc")
_DELETED: Final = " (deleted)"


def group_members(pgid: int, proc: Path = PROC) -> list[int]:
    """Living processes of a process group."""
    members = []
    for pid in _pids(proc):
        try:
            stat = (proc / str(pid) / "stat").read_text(errors="surrogateescape")  # names are cut between bytes
        except OSError:
            continue  # it ended meanwhile
        # pid (comm, may contain anything) state ppid pgrp ...
        state, _, group = stat.rpartition(")")[2].split()[:3]
        if int(group) == pgid and state not in "ZX":
            members.append(pid)
    return members


def mapped_files(pids: Iterable[int], proc: Path = PROC, shm: Path = SHM) -> set[str]:
    """Names in /dev/shm that these processes have mapped; those already unlinked are left out."""
    prefix = f"{shm}/"
    found = set()
    for pid in pids:
        try:
            maps = (proc / str(pid) / "maps").read_text(errors="surrogateescape")
        except OSError:
            continue  # it ended meanwhile
        for line in maps.splitlines():
            at = line.find(prefix)
            if at >= 0 and not line.endswith(_DELETED):
                found.add(line[at + len(prefix) :])
    return {name for name in found if "/" not in name}


def remove(names: Iterable[str], proc: Path = PROC, shm: Path = SHM) -> list[str]:
    """Unlink those that no living process maps any more and that are ours; which ones went."""
    return [name for name in _unmapped(names, proc, shm) if _unlink(shm / name)]


def unmapped_bytes(names: Iterable[str], proc: Path = PROC, shm: Path = SHM) -> int:
    """What those hold that `remove` would unlink."""
    return sum(_bytes(shm / name) for name in _unmapped(names, proc, shm))


def _unmapped(names: Iterable[str], proc: Path, shm: Path) -> list[str]:
    names = set(names)
    return sorted(names - mapped_files(_pids(proc), proc, shm)) if names else []


def _bytes(path: Path) -> int:
    try:
        status = path.lstat()
    except OSError:
        return 0
    return status.st_blocks * 512 if status.st_uid == os.geteuid() else 0


def _unlink(path: Path) -> bool:
    try:
        if path.lstat().st_uid != os.geteuid():
            return False
        path.unlink()
    except OSError:
        return False  # gone already, or not ours to remove
    return True


def _pids(proc: Path) -> list[int]:
    return [int(entry) for entry in os.listdir(proc) if entry.isdecimal()]
