"""Memory of this container, as the kernel counts it for the limit (cgroup v2), and the size of /dev/shm.

Pages of files are left out: they are given back when memory is short. What is left, private memory and shared memory, is
what a container is killed for.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from prefixpool.wire import Memory
from prefixpool_agent.shm import SHM

_MOUNT: Final = Path("/sys/fs/cgroup")
_OWN: Final = Path("/proc/self/cgroup")
_KEPT: Final = ("anon", "shmem")  # lines of memory.stat


class MemoryWatch:
    """Looks now and then, and remembers the most that it saw: the kernel's own peak counts pages of files, too."""

    def __init__(self, mount: Path = _MOUNT, own: Path = _OWN, shm: Path = SHM) -> None:
        self._mount = mount
        self._own = own
        self._shm = shm
        self._most_bytes = 0

    def look(self) -> Memory:
        """Cheap: the kernel makes these files up. Zeros where nothing is said, as outside of Linux or with cgroup v1."""
        folder = self._mount / _group(_read(self._own))
        used_bytes = kept_bytes(_read(folder / "memory.stat"))
        self._most_bytes = max(self._most_bytes, used_bytes)
        return Memory(
            limit_bytes=limit_bytes(_read(folder / "memory.max")),
            used_bytes=used_bytes,
            most_used_bytes=self._most_bytes,
            shared_limit_bytes=_size(self._shm),
        )


def kept_bytes(stat: str) -> int:
    """Of the text of memory.stat: what cannot be given back. Pure."""
    lines = dict(line.split(" ", 1) for line in stat.splitlines() if " " in line)
    return sum(int(lines.get(name, "0")) for name in _KEPT)


def limit_bytes(text: str) -> int:
    """Of the text of memory.max; 0: none. Pure."""
    return int(text) if text.strip().isdecimal() else 0


def _group(own: str) -> str:
    """This process's group below the mount, from /proc/self/cgroup; "" in a container, which sees its own as the root."""
    return next((line[3:].strip().lstrip("/") for line in own.splitlines() if line.startswith("0::")), "")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _size(folder: Path) -> int:
    try:
        status = os.statvfs(folder)
    except OSError:
        return 0
    return status.f_blocks * status.f_frsize
