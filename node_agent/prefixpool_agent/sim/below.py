"""The tiers below the device as one: what is not in host memory may be on disk, and comes up through it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from prefixpool_agent.sim.disk import DiskTier
from prefixpool_agent.sim.host import Copy, HostTier
from prefixpool_agent.sim.pool import Event


class Found(NamedTuple):
    """A copy, and whether the disk had to be read for it."""

    copy: Copy
    from_disk: bool


class Below:
    """Host memory and, perhaps, disk. Without host memory there is no tier: all that goes to disk goes through it."""

    def __init__(self, host: HostTier, disk: DiskTier | None = None) -> None:
        self.host = host
        self.disk = disk
        self._events: list[Event] = []  # announced one step after they happened, as vLLM's connector does

    @property
    def exists(self) -> bool:
        """There is a tier below the device."""
        return bool(self.host.capacity)

    def store(self, digests: Sequence[bytes], index: int, copy: Copy, stored: Event) -> None:
        """Block `index` of a prompt; `stored` is its event as the device told it."""
        self.host.store(digests[index], copy, stored)
        if self.disk is not None:
            parent = digests[index - 1] if index else None
            self.disk.store(digests[index], parent, (index + 1) * len(copy.content), copy, stored)

    def match(self, digests: Sequence[bytes], start: int, end: int, *, disk: bool = True) -> list[Found]:
        """Copies that continue a prefix of `start` blocks, up to block `end`. Without `disk` that is not looked at."""
        found: list[Found] = []
        for digest in digests[start:end]:
            if (copy := self.host.get(digest)) is not None:
                found.append(Found(copy, from_disk=False))
                if self.disk is not None:
                    self.disk.use(digest)
            elif disk and self.disk is not None and (copy := self.disk.read(digest)) is not None:
                found.append(Found(copy, from_disk=True))
            else:
                break
        return found

    def promote(self, digest: bytes, copy: Copy, stored: Event) -> None:
        """What came from disk is in host memory, too."""
        self.host.store(digest, copy, stored)

    def reset(self) -> None:
        """Empty host memory; the disk keeps what it has, as vLLM's secondary tiers do."""
        self.host.reset()

    def take_events(self) -> list[Event]:
        """What happened in the step before this one."""
        events, self._events = self._events, self.host.take_events() + (self.disk.take_events() if self.disk else [])
        return events
