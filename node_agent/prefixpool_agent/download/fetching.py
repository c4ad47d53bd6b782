"""Tries until all files of a model are there, and tells how far it is. Blocks; the Hub's library knows threads only."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from prefixpool.errors import PrefixpoolError
from prefixpool.sizing import stored
from prefixpool.sizing.reasons import gib
from prefixpool.wire import Download
from prefixpool_agent.download.cache import Cache
from prefixpool_agent.download.files import DownloadError, Listing, done_bytes, needed
from prefixpool_agent.download.pace import Pace

FIRST_PAUSE_S: Final = 2.0
LONGEST_PAUSE_S: Final = 30.0
_LOOK_S: Final = 1.0
_AT_ONCE: Final = 8
_COMMIT: Final = 40  # digits: such a revision never moves


class Source(Protocol):
    """`hub.Hub`."""

    def offline(self, revision: str) -> Path | None: ...

    def listing(self, revision: str) -> Listing: ...

    def fetch(self, commit: str, name: str) -> Path: ...


class Fetching:
    """One model. `tell` hears how far it is, and at every look that it is alive; `pause` waits so many seconds before the
    next try. `clock`: seconds; `since_s`: see `Pace`.
    """

    def __init__(
        self,
        model: str,
        revision: str,
        *,
        hub: Source,
        cache: Cache,
        tell: Callable[[Download], None],
        pause: Callable[[float], object],
        clock: Callable[[], float] = time.monotonic,
        since_s: float | None = None,
    ) -> None:
        self._model = model
        self._revision = revision
        self._hub = hub
        self._cache = cache
        self._tell = tell
        self._pause = pause
        self._clock = clock
        self._since_s = since_s
        self._seen = Download(model=model)

    def run(self) -> Path:
        """Returns when all files are there, where they are: what is refused today may be allowed tomorrow.

        Raises StuckError.
        """
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return self._once()
            except (PrefixpoolError, OSError) as error:
                self._say(problem=str(error))
            self._pause(pause_s)
            pause_s = min(LONGEST_PAUSE_S, pause_s * 2)

    def _once(self) -> Path:
        here = self._cache.remembered(self._revision)
        if here is not None and len(self._revision) == _COMMIT:
            return self._cache.snapshot(here)
        try:
            if (filled := self._hub.offline(self._revision)) is not None:
                return filled
            listing = self._listing()
        except DownloadError:
            if here is None:
                raise
            return self._cache.snapshot(here)  # what a branch was; better than no engine
        if not self._cache.complete(listing):
            self._fetch(listing)
        with suppress(OSError):  # a cache that was filled by others and is read-only
            self._cache.remember(self._revision, listing)
        return self._cache.snapshot(listing)

    def _listing(self) -> Listing:
        found = self._hub.listing(self._revision)
        has_index = any(file.name == stored.INDEX for file in found.files)
        index: dict[str, Any] | None = None
        if has_index:
            index = stored.decoded(self._hub.fetch(found.commit, stored.INDEX).read_bytes(), stored.INDEX)
        listing = needed(found, index)
        if not listing.files:
            raise DownloadError(f"{self._model} has no weights that the engine reads (safetensors, or PyTorch's)")
        return listing

    def _fetch(self, listing: Listing) -> None:
        """All files at once, each of them once, whoever else fetches them."""
        self._cache.remove_abandoned(listing.files)
        pace, self._since_s = Pace(self._clock(), self._since_s), None
        self._check_room(listing, pace)
        pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="download")
        try:
            pending = {pool.submit(self._hub.fetch, listing.commit, file.name) for file in listing.files}
            failed: BaseException | None = None
            while pending:
                done, pending = wait(pending, timeout=_LOOK_S)
                self._measure(listing, pace)
                failed = failed or _error(done)
                if failed is not None:
                    pending = {one for one in pending if not one.cancel()}
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # whoever still works hangs
        if failed is not None:
            raise failed
        self._cache.remove_abandoned(listing.files)

    def _check_room(self, listing: Listing, pace: Pace) -> None:
        lacking, free = listing.total_bytes - self._measure(listing, pace), self._cache.free_bytes()
        if free < lacking:
            raise DownloadError(f"{self._cache.root} has {gib(free)} free, {gib(lacking)} are still to come")

    def _measure(self, listing: Listing, pace: Pace) -> int:
        done, now_s = done_bytes(listing, self._cache.on_disk()), self._clock()
        pace.seen(done, now_s)
        self._say(done_bytes=done, total_bytes=listing.total_bytes, problem=pace.problem(now_s))
        return done

    def _say(self, **changes: Any) -> None:
        self._seen = msgspec.structs.replace(self._seen, **changes)
        self._tell(self._seen)


def _error(done: set[Future[Path]]) -> BaseException | None:
    return next((error for one in done if (error := one.exception()) is not None), None)
