"""How busy one replica is: the agent's count for all routers, corrected by what this router sent and saw end since.

When a report arrives, the requests of this router that are in flight count as part of it; what is left belongs to others.
From then on this router's own starts and ends are exact and the others' share is a constant until the next report, at most
50 ms later. So nothing is counted twice, nothing goes negative, and after any number of aborts the count returns to zero.
A report can be a few milliseconds too old to hold this router's newest requests; that errs towards too little for one
reporting interval, and never below this router's own requests.
"""

from __future__ import annotations

from prefixpool.wire import Load


class LoadBook:
    """Counts of one replica. Requests, and prompt tokens that are neither cached nor prefilled yet."""

    __slots__ = ("_others", "_others_tokens", "own", "own_tokens")

    def __init__(self) -> None:
        self.own = 0
        self.own_tokens = 0
        self._others = 0
        self._others_tokens = 0

    @property
    def inflight(self) -> int:
        """Requests in the replica, of all routers."""
        return self.own + self._others

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens waiting for prefill, of all routers."""
        return self.own_tokens + self._others_tokens

    def reported(self, load: Load) -> None:
        """The agent's newest numbers."""
        self._others = max(0, load.inflight - self.own)
        self._others_tokens = max(0, load.prefill_backlog_tokens - self.own_tokens)

    def report_expired(self) -> None:
        """The newest report is too old to say anything: own requests only, which is not the same as saturated."""
        self._others = self._others_tokens = 0

    def full(self, bound: int) -> None:
        """Its gate refused a request for want of a place, whatever the newest report said; the next one corrects this."""
        self._others = max(self._others, bound - self.own)

    def book(self, uncached_tokens: int) -> Booking:
        """A request was sent there."""
        self.own += 1
        self.own_tokens += uncached_tokens
        return Booking(self, uncached_tokens)


class Booking:
    """One request's share of a `LoadBook`; each step counts once, in whatever order and number calls come."""

    __slots__ = ("_book", "_tokens")

    def __init__(self, book: LoadBook, uncached_tokens: int) -> None:
        self._book: LoadBook | None = book
        self._tokens = uncached_tokens

    def prefilled(self) -> None:
        """Its prompt is computed."""
        if self._book is not None:
            self._book.own_tokens -= self._tokens
            self._tokens = 0

    def release(self) -> None:
        """It is over."""
        self.prefilled()
        if self._book is not None:
            self._book.own -= 1
            self._book = None
