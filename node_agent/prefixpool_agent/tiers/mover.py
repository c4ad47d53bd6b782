"""What I/O threads do with one chunk: read or write its file, count how that goes, leave a broken disk alone for a while."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

from prefixpool_agent.tiers.disk_ledger import Failure, StoreError
from prefixpool_agent.tiers.disk_store import DiskStore
from prefixpool_agent.tiers.trail import Place
from prefixpool_agent.tiers.transfers import Part

PAUSE_S: Final = 5.0  # without writes, behind one that failed
_log = logging.getLogger(__name__)


class StoreMover:
    """See `transfers.Mover`. `failed` is called when something should be looked at."""

    def __init__(self, store: DiskStore, failed: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._failed = failed
        self._clock = clock
        self._paused_until_s = float("-inf")
        self._places: dict[bytes, Place] = {}
        self.counts = store.counts  # one tally for all that happens to chunks

    @property
    def takes_writes(self) -> bool:
        """Not behind a failure."""
        return self._clock() >= self._paused_until_s

    def place(self, places: Mapping[bytes, Place]) -> None:
        """Parents and positions of chunks that are about to be written."""
        self._places.update(places)

    def fetch(self, part: Part, buffer: bytearray) -> memoryview | None:
        """See `Mover`."""
        try:
            payload = self._store.read(part.key, buffer)
        except StoreError as error:
            self._count("read", error.failure)
            return None
        self.counts.add("read")
        return payload

    def put(self, part: Part, payload: memoryview) -> bool:
        """See `Mover`."""
        place = self._places.pop(part.key, Place())
        if not self.takes_writes:
            self.counts.add("write_skipped")
            return False
        try:
            if self._store.write(part.key, place, payload):
                self.counts.add("written")
        except StoreError as error:
            self._count("write", error.failure)
            if self.takes_writes:
                _log.warning("disk tier takes no chunks for %g s: %s", PAUSE_S, error)
            self._paused_until_s = self._clock() + PAUSE_S
            self._failed()
            return False
        return True

    def leave(self, part: Part) -> None:
        """See `Mover`."""
        self._places.pop(part.key, None)

    def _count(self, what: str, failure: Failure) -> None:
        self.counts.add(f"{what}_{failure}")
