"""Looking for prompt text and token ids where none may be, and for sockets that nobody should have opened."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from prefixpool_agent.sim.tokenizer import SimTokenizer

_LISTEN: Final = "0A"  # state in /proc/net/tcp


class Traces:
    """All forms in which a word of a prompt, or two tokens of it in a row, could be written down."""

    def __init__(self, word: str) -> None:
        first, second = _inner_pair(SimTokenizer().encode(f" {word}"))
        self._forms = {
            "text": word.encode(),
            "ids as text": b"%d, %d" % (first, second),
            "ids as dense text": b"%d,%d" % (first, second),
            "ids in MessagePack": msgspec.msgpack.encode(first) + msgspec.msgpack.encode(second),
            "ids as u32": struct.pack("<II", first, second),
            "ids as big-endian u32": struct.pack(">II", first, second),
            "ids as u64": struct.pack("<QQ", first, second),
        }

    def found_in(self, data: bytes) -> list[str]:
        """Names of the forms."""
        return [name for name, form in self._forms.items() if form in data]


def _inner_pair(tokens: Sequence[int]) -> tuple[int, int]:
    assert len(tokens) >= 3, "the word must be long enough for two tokens that no other word has"
    return tokens[1], tokens[2]


def descendants(roots: Iterable[int]) -> set[int]:
    """These processes and all below them."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has just ended
            parents[int(entry.name)] = int(fields[1])
    found = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def listening_ports(pids: Iterable[int]) -> set[int]:
    """TCP ports, of any address family, on which these processes listen."""
    inodes = {inode for pid in pids for inode in _socket_inodes(pid)}
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and fields[9] in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def _socket_inodes(pid: int) -> set[str]:
    found = set()
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            target = os.readlink(entry.path)
            if target.startswith("socket:["):
                found.add(target[8:-1])
    except FileNotFoundError:
        return found  # the process, or a file of its, has just gone
    return found
