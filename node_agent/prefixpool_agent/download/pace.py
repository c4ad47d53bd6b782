"""Whether bytes still come. Pure: times are handed in, in seconds of any clock that does not go back."""

from __future__ import annotations

from typing import Final

STALLED_S: Final = 300.0  # without a byte: to be told. The Hub's library gives up on a silent connection within seconds
STUCK_S: Final = 600.0  # without one in this process: to begin anew, which ends threads that hang and frees their locks
STALLED: Final = (
    f"no bytes have come for more than {STALLED_S / 60:g} minutes: the way to the Hub hangs, or the disk of the cache, "
    "or a replica that shares it"
)


class StuckError(Exception):
    """Only a fresh process helps. `since_s`: when bytes came last."""

    def __init__(self, since_s: float) -> None:
        super().__init__(STALLED)
        self.since_s = since_s


class Pace:
    """Of one try to fetch all files. Bytes are of all who share the cache."""

    def __init__(self, now_s: float, since_s: float | None = None) -> None:
        """`since_s`: when bytes came last, if a process before this one was stuck."""
        self._since_s = now_s if since_s is None else since_s
        self._here_s = now_s
        self._done_bytes: int | None = None

    def seen(self, done_bytes: int, now_s: float) -> None:
        """So many are there. Fewer than before is no progress: parts of files that nobody goes on with were removed."""
        if self._done_bytes is not None and done_bytes > self._done_bytes:
            self._since_s = self._here_s = now_s
        self._done_bytes = done_bytes

    def problem(self, now_s: float) -> str:
        """ "": bytes come. Raises StuckError."""
        if now_s - self._here_s >= STUCK_S:
            raise StuckError(self._since_s)
        return STALLED if now_s - self._since_s >= STALLED_S else ""
