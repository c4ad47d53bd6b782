"""Who acts on what a replica learns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from prefixpool_router.replica import Replica


class Watcher(Protocol):
    """Told of every change of one replica."""

    def judge(self, replica: Replica) -> None:
        """The verdict, the picture in use, or costs may have changed."""
        ...

    def weigh(self, replica: Replica) -> None:
        """Only its load changed, or trust in predictions for it."""
        ...

    def snapshot_begun(self, replica: Replica) -> None:
        """To be counted."""
        ...

    def stream_lost(self, replica: Replica) -> None:
        """To be counted."""
        ...
