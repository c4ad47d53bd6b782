"""Looks after a directory of chunks from a thread of its own: opens it, counts, collects; again soon after a failure."""

from __future__ import annotations

import logging
import threading
from typing import Final

from prefixpool_agent.tiers.disk_ledger import StoreError
from prefixpool_agent.tiers.disk_store import DiskStore

SHARED_S: Final = 30.0  # what others wrote and removed is known by then
ALONE_S: Final = 300.0  # nobody else should touch it
SOON_S: Final = 2.0
_log = logging.getLogger(__name__)


class Care:
    """One per store. A directory that cannot be used is tried again and again; until then the tier is empty."""

    def __init__(self, store: DiskStore, *, shared: bool) -> None:
        self._store = store
        self._every_s = SHARED_S if shared else ALONE_S
        self._soon = threading.Event()
        self._stopped = threading.Event()

    def start(self, *, wait: bool = False) -> None:
        """Returns at once, and what is there is known when it has been read; with `wait` it is known on return."""
        first_s = self._look() if wait else None
        threading.Thread(target=self._run, args=(first_s,), daemon=True, name="prefixpool-disk-care").start()

    def soon(self) -> None:
        """Something failed."""
        self._soon.set()

    def stop(self) -> None:
        """Let another collect."""
        self._stopped.set()
        self._soon.set()
        self._store.close()

    def _run(self, pause_s: float | None) -> None:
        while not self._stopped.is_set():
            self._soon.wait(self._look() if pause_s is None else pause_s)
            pause_s = None
            self._soon.clear()
            self._stopped.wait(SOON_S)

    def _look(self) -> float:
        """Seconds until the next look, unless something fails before."""
        try:
            self._store.open()
            self._store.collect()
        except StoreError as error:
            _log.error("disk tier: %s", error)
            return SOON_S
        return self._every_s
