"""The disk tier: our own store, which real engines use, with blocks of token ids as its chunks. It reads and writes files.

What a chunk holds is all that a `Copy` holds, in a fixed number of bytes:

    digest of the contents up to here 16 | token ids u32 each                                   (little endian)

Not kept: I/O threads and deadlines of real engines. A disk that hangs would stop the simulation, not one request.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final, NamedTuple

from prefixpool_agent.sim.host import Copy
from prefixpool_agent.sim.pool import Event, removed
from prefixpool_agent.tiers.chunk_file import HEAD_BYTES
from prefixpool_agent.tiers.disk_care import Care
from prefixpool_agent.tiers.disk_store import DiskStore, Limits
from prefixpool_agent.tiers.identity import namespace
from prefixpool_agent.tiers.mover import StoreMover
from prefixpool_agent.tiers.tally import Tally
from prefixpool_agent.tiers.trail import GROUP_BYTES, Place
from prefixpool_agent.tiers.transfers import Part
from prefixpool_agent.tiers.worth import recompute

MEDIUM_DISK: Final = "STORAGE"
STATE_BYTES: Final = 16
_FIRST_GROUP: Final = bytes(GROUP_BYTES)


class DiskConfig(NamedTuple):
    """Where blocks lie, and how many. `shared`: other sims use the folder, too."""

    folder: Path
    blocks: int
    free_bytes: int  # of the file system, left for others
    shared: bool


class DiskTier:
    """Blocks on disk, of this engine and of all that ran before it in the same folder."""

    def __init__(self, config: DiskConfig, model: str, block_tokens: int) -> None:
        self._layout = struct.Struct(f"<{STATE_BYTES}s{block_tokens}I")
        self._chunk_bytes = HEAD_BYTES + self._layout.size
        self.capacity = config.blocks
        limits = Limits(config.blocks * self._chunk_bytes, config.free_bytes, config.shared)
        # The prefix keeps a sim's chunks apart from those of an engine with a model, and a name from being read as a folder.
        whose = namespace(f"sim:{model}", {"block_tokens": block_tokens})
        self._store = DiskStore(config.folder, whose, limits, recompute)
        self._shared = config.shared
        self._care = Care(self._store, shared=config.shared)
        self._mover = StoreMover(self._store, self._care.soon)
        self._buffer = bytearray(self._chunk_bytes)
        self._events: list[Event] = []

    def __len__(self) -> int:
        return len(self._store)

    @property
    def folder(self) -> Path:
        """Of this model's chunks."""
        return self._store.folder

    @property
    def used_blocks(self) -> int:
        """In all files of the folder, whoever wrote them, as last counted."""
        return self._store.last_used // self._chunk_bytes

    @property
    def counts(self) -> Tally:
        """What happened to chunks, by the names of the disk tier's metric."""
        return self._mover.counts

    def open(self) -> None:
        """Make the folder and know what is there. One that cannot be used is tried again from then on; it holds nothing."""
        self._care.start(wait=True)

    def close(self) -> None:
        """Let another collect."""
        self._care.stop()

    def holds(self, digest: bytes) -> bool:
        """A block is there, as far as is known; of a shared folder the disk is asked."""
        return self._store.exists(_key(digest)) if self._shared else self._store.holds(_key(digest))

    def use(self, digest: bytes) -> None:
        """Asked for, and had from above."""
        self._store.use(_key(digest))

    def read(self, digest: bytes) -> Copy | None:
        """None: it is not there, or no good any more."""
        if not self.holds(digest):
            return None
        payload = self._mover.fetch(Part(_key(digest), 0), self._buffer)
        if payload is None:
            return None
        state, *content = self._layout.unpack(payload)
        return Copy(tuple(content), state)

    def store(self, digest: bytes, parent: bytes | None, tokens: int, copy: Copy, stored: Event) -> None:
        """`tokens`: where in its prompt the block ends; `parent`: the block before it. Announced unless it was there."""
        key = _key(digest)
        if self._store.holds(key):
            self._store.use(key)
            return
        self._mover.place({key: Place(_key(parent) if parent else b"", tokens)})
        if self._mover.put(Part(key, 0), memoryview(self._layout.pack(copy.state, *copy.content))):
            self._events.append({**stored, "medium": MEDIUM_DISK})

    def take_events(self) -> list[Event]:
        """What came by this engine's hand, and what went."""
        events, self._events = self._events, []
        gone = [removed(key[:-GROUP_BYTES], MEDIUM_DISK) for key in self._store.take_removed()]
        return events + gone


def _key(digest: bytes) -> bytes:
    return digest + _FIRST_GROUP
