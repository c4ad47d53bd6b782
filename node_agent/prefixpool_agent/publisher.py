"""What the routers are told: a snapshot each, then changes, and the latest load, costs and state. No sockets here.

A router that reads slowly costs a bounded queue: beyond it the changes are dropped and a new snapshot is due, which is taken
only when the router can take a frame again. Frames are encoded once and shared by all routers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol, TypeVar

from msgspec import structs

from prefixpool import wire

T = TypeVar("T")
L = TypeVar("L", wire.Status, wire.Costs)

CHUNK: Final = 4096  # boundaries in one frame: 48 KiB
QUEUE_BYTES: Final = 2 << 20
MAX_ROUTERS: Final = 512

Latest = wire.Load | wire.Costs | wire.Status  # messages of which only the newest matters
Snapshot = Callable[[], Iterable[tuple[wire.Tier, Sequence[int], Sequence[int]]]]


class PublisherMetrics(Protocol):
    """What is counted."""

    def routers(self, connected: int) -> None:
        """Connections now."""
        ...

    def overflowed(self) -> None:
        """A router's queue was dropped."""
        ...

    def snapshot_taken(self, reason: str) -> None:
        """One router gets a new picture."""
        ...

    def stream_broken(self) -> None:
        """A bug ended one router's stream."""
        ...


class RouterLink:
    """One router's pending frames. `next_frame()` is called by its writer, the rest by the publisher."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.wake = asyncio.Event()
        self.acknowledged_epoch = -1
        self._head: deque[bytes] = deque()
        self._latest: dict[type[Latest], bytes] = {}
        self._snapshot: deque[bytes] = deque()
        self._changes: deque[bytes] = deque()
        self._changes_bytes = 0
        self._wanted: str | None = None
        self.synchronised = False  # holds a whole picture
        self.closing = False

    def greet(self, frame: bytes) -> None:
        """A welcome goes before everything else."""
        self._head.append(frame)
        self.wake.set()

    def close(self) -> None:
        """Let it connect anew: a welcome is said once in a connection."""
        self.closing = True
        self.wake.set()

    def latest(self, kind: type[Latest], frame: bytes) -> None:
        """Only the newest of its kind matters."""
        self._latest[kind] = frame
        self.wake.set()

    def want_snapshot(self, reason: str) -> None:
        """All that is queued is void; a new picture as soon as the router takes a frame."""
        self._wanted = reason
        self.synchronised = False
        self._snapshot.clear()
        self._changes.clear()
        self._changes_bytes = 0
        self.wake.set()

    def change(self, frame: bytes) -> bool:
        """Queue a change. False: it did not fit, and a snapshot is due instead."""
        if self._wanted is not None:
            return True
        if self._changes_bytes + len(frame) > QUEUE_BYTES:
            self.want_snapshot("router too slow")
            return False
        self._changes.append(frame)
        self._changes_bytes += len(frame)
        self.wake.set()
        return True

    def next_frame(self, snapshot: Callable[[str], Iterable[bytes]] | None) -> bytes | None:
        """What to send next; None: nothing, wait for `wake`. `snapshot` None: there is none to be had yet."""
        if self._head:
            return self._head.popleft()
        if self._latest:
            return self._latest.pop(next(iter(self._latest)))
        if self._wanted is not None and snapshot is not None:
            reason, self._wanted = self._wanted, None
            self._snapshot.extend(snapshot(reason))
        if self._snapshot:
            frame = self._snapshot.popleft()
            self.synchronised = not self._snapshot
            return frame
        if self._changes:
            frame = self._changes.popleft()
            self._changes_bytes -= len(frame)
            return frame
        return None


class Publisher:
    """All routers of one agent."""

    def __init__(self, welcome: wire.Welcome, snapshot: Snapshot, metrics: PublisherMetrics) -> None:
        self._welcome = welcome
        self._source = snapshot
        self._metrics = metrics
        self._links: set[RouterLink] = set()
        self._latest: dict[type[Latest], Latest] = {}
        self._encoded: tuple[int, list[bytes]] | None = None
        self._held = False

    @property
    def epoch(self) -> int:
        """The engine start that is being published."""
        return self._welcome.epoch

    @property
    def status(self) -> wire.Status | None:
        """What was told last."""
        return self._told(wire.Status)

    @property
    def costs(self) -> wire.Costs | None:
        """What was told last."""
        return self._told(wire.Costs)

    @property
    def connected(self) -> int:
        """Routers now."""
        return len(self._links)

    @property
    def full(self) -> bool:
        """No more routers are taken."""
        return len(self._links) >= MAX_ROUTERS

    def join(self, name: str) -> RouterLink:
        """A router said hello."""
        link = RouterLink(name)
        link.greet(wire.encode(self._welcome))
        for kind, message in self._latest.items():
            link.latest(kind, wire.encode(message))
        link.want_snapshot("connected")
        self._links.add(link)
        self._metrics.routers(len(self._links))
        return link

    def leave(self, link: RouterLink) -> None:
        """Its connection is gone."""
        self._links.discard(link)
        self._metrics.routers(len(self._links))

    def broken(self) -> None:
        """A bug ended a link's writer. What was encoded for all may be to blame, and is not sent again."""
        self._encoded = None
        self._metrics.stream_broken()

    def next_frame(self, link: RouterLink) -> bytes | None:
        """For the link's writer."""
        return link.next_frame(None if self._held else self._snapshot_frames)

    def hold(self) -> None:
        """No snapshots for now: the picture has holes, and until it is whole routers do better with what they remember."""
        self._held = True

    def release(self) -> None:
        """The picture is whole."""
        if self._held:
            self._held, self._encoded = False, None
            for link in self._links:
                link.wake.set()

    def welcome(self, welcome: wire.Welcome, reason: str) -> None:
        """Who we are has changed. Another epoch alone is a new picture; other facts need a new connection."""
        facts_changed = structs.replace(welcome, epoch=self._welcome.epoch) != self._welcome
        self._welcome = welcome
        self.restart(reason)
        if facts_changed:
            for link in self._links:
                link.close()

    def synchronised(self) -> bool:
        """At least one router holds a whole picture."""
        return any(link.synchronised for link in self._links)

    def restart(self, reason: str) -> None:
        """What routers hold may be wrong: a new picture for each."""
        self._encoded = None
        for link in self._links:
            link.want_snapshot(reason)

    def publish(
        self, publish: Mapping[wire.Tier, Sequence[tuple[int, int]]], retract: Mapping[wire.Tier, Sequence[int]]
    ) -> None:
        """Changes since the last call; what is new first, so that a boundary that moves between tiers is never nowhere."""
        frames: list[bytes] = []
        for tier, pairs in publish.items():
            frames += [_publish(tier, [h for h, _ in part], [d for _, d in part]) for part in _chunks(pairs)]
        for tier, gone in retract.items():
            frames += [wire.encode(wire.Retract(tier=tier, hashes=wire.pack_hashes(part))) for part in _chunks(gone)]
        if not frames:
            return
        self._encoded = None
        for link in self._links:
            if not all(link.change(frame) for frame in frames):
                self._metrics.overflowed()

    def tell(self, message: Latest) -> None:
        """The latest of its kind, to all routers now and to each that joins."""
        kind = type(message)
        self._latest[kind] = message
        frame = wire.encode(message)
        for link in self._links:
            link.latest(kind, frame)

    def unacknowledged(self) -> int:
        """Routers that have not said that they send nothing new to this epoch."""
        return sum(link.acknowledged_epoch != self._welcome.epoch for link in self._links)

    def refence(self) -> None:
        """A new fence needs new acknowledgements."""
        for link in self._links:
            link.acknowledged_epoch = -1

    def _told(self, kind: type[L]) -> L | None:
        message = self._latest.get(kind)
        return message if isinstance(message, kind) else None

    def _snapshot_frames(self, reason: str) -> Iterable[bytes]:
        self._metrics.snapshot_taken(reason)
        if self._encoded is None:
            self._encoded = _encode(self._source())
        boundaries, frames = self._encoded
        yield wire.encode(wire.SnapshotBegin(epoch=self.epoch, boundaries=boundaries, reason=reason))
        yield from frames
        yield wire.encode(wire.SnapshotEnd(epoch=self.epoch))


def _encode(parts: Iterable[tuple[wire.Tier, Sequence[int], Sequence[int]]]) -> tuple[int, list[bytes]]:
    boundaries = 0
    frames: list[bytes] = []
    for tier, hashes, depths in parts:
        boundaries += len(hashes)
        starts = range(0, len(hashes), CHUNK)
        frames.extend(_publish(tier, hashes[at : at + CHUNK], depths[at : at + CHUNK]) for at in starts)
    return boundaries, frames


def _publish(tier: wire.Tier, hashes: Sequence[int], depths: Sequence[int]) -> bytes:
    return wire.encode(wire.Publish(tier=tier, hashes=wire.pack_hashes(hashes), depths=wire.pack_depths(depths)))


def _chunks(items: Sequence[T]) -> Iterable[Sequence[T]]:
    return (items[at : at + CHUNK] for at in range(0, len(items), CHUNK))
