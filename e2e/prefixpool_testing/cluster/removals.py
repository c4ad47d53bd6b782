"""What tests leave of a cluster's namespaces goes while other tests run."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Removals:
    """Namespaces on their way out. That each of them goes is a promise, too."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._begun: list[Future[None]] = []

    def submit(self, remove: Callable[[], None]) -> None:
        self._begun.append(self._threads.submit(remove))

    def until_done(self) -> None:
        """Those that were begun. Raises what the first that failed raised."""
        begun, self._begun = self._begun, []
        for one in begun:
            one.result()
