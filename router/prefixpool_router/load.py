"""How busy one replica is: the agent's count for all routers, corrected by what this router sent and saw end since.

When a report arrives, the requests of this router that are in flight count as part of it; what is left belongs to others.
From then on this router's own starts and ends are exact and the others' share is a constant until the next report, at most
50 ms later. So nothing is counted twice, nothing goes negative, and after any number of aborts the count returns to zero.
A report can be a few milliseconds too old to hold this router's newest requests; that errs towards too little for one
reporting interval, and never below this router's own requests.

The first byte of a stream says that its prompt is computed. Of an answer that comes whole only the agent can say so, by a
backlog that is smaller than what this router still counts as waiting (`_computed_by`).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from prefixpool.wire import STALE_AFTER_S, Load

# A report says something of a request that was sent so long before: an agent that lags behind more is given up as silent.
TOLD_AFTER_S: Final = STALE_AFTER_S


class LoadBook:
    """Counts of one replica. Requests, and prompt tokens that are neither cached nor prefilled yet."""

    __slots__ = ("_new", "_others", "_others_tokens", "_told", "_told_tokens", "_whole", "own", "own_tokens")

    def __init__(self) -> None:
        self.own = 0
        self.own_tokens = 0
        self._others = 0
        self._others_tokens = 0
        # Own requests whose prompts wait, the oldest first: those that a report can be too old for, all others, and of
        # these the ones whose answers are not streamed.
        self._new: OrderedDict[Booking, None] = OrderedDict()
        self._told: set[Booking] = set()
        self._whole: OrderedDict[Booking, None] = OrderedDict()
        self._told_tokens = 0

    @property
    def inflight(self) -> int:
        """Requests in the replica, of all routers."""
        return self.own + self._others

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens waiting for prefill, of all routers."""
        return self.own_tokens + self._others_tokens

    def reported(self, load: Load, now_s: float) -> None:
        """The agent's newest numbers."""
        self._computed_by(load.prefill_backlog_tokens, now_s)
        self._others = max(0, load.inflight - self.own)
        self._others_tokens = max(0, load.prefill_backlog_tokens - self.own_tokens)

    def report_expired(self) -> None:
        """The newest report is too old to say anything: own requests only, which is not the same as saturated.

        An agent that is heard again may be another one, which knows nothing of what was sent before.
        """
        self._others = self._others_tokens = self._told_tokens = 0
        for waiting in (self._new, self._told, self._whole):
            waiting.clear()

    def full(self, bound: int) -> None:
        """Its gate refused a request for want of a place, whatever the newest report said; the next one corrects this."""
        self._others = max(self._others, bound - self.own)

    def book(self, uncached_tokens: int, now_s: float, *, whole: bool) -> Booking:
        """A request was sent there. `whole`: its answer is not streamed, and the agent knows how long its prompt is."""
        booking = Booking(self, uncached_tokens, now_s, whole=whole)
        self.own += 1
        self.own_tokens += uncached_tokens
        self._new[booking] = None
        return booking

    def computed(self, booking: Booking, tokens: int) -> None:
        """By bookings only: so much of one's prompt is computed."""
        self.own_tokens -= tokens
        if booking in self._told:
            self._told_tokens -= tokens
        if not booking.tokens:
            self._new.pop(booking, None)
            self._told.discard(booking)
            self._whole.pop(booking, None)

    def _computed_by(self, backlog: int, now_s: float) -> None:
        """Of requests that the agent has heard of, no more waits than it says. Engines take prompts in order of arrival, so
        what it does not count any more are the oldest; streams tell their end of prefill themselves."""
        while self._new and now_s - (booking := next(iter(self._new))).sent_s >= TOLD_AFTER_S:
            del self._new[booking]
            self._told.add(booking)
            self._told_tokens += booking.tokens
            if booking.whole:
                self._whole[booking] = None
        while self._whole and (excess := self._told_tokens - max(0, backlog)) > 0:
            next(iter(self._whole)).computed(excess)


class Booking:
    """One request's share of a `LoadBook`; each step counts once, in whatever order and number calls come."""

    __slots__ = ("_book", "sent_s", "tokens", "whole")

    def __init__(self, book: LoadBook, uncached_tokens: int, sent_s: float, *, whole: bool) -> None:
        self._book: LoadBook | None = book
        self.tokens = uncached_tokens  # that wait for prefill
        self.sent_s = sent_s
        self.whole = whole

    def computed(self, tokens: int) -> None:
        """So many tokens of its prompt, or all that wait."""
        if self._book is not None:
            done = min(tokens, self.tokens)
            self.tokens -= done
            self._book.computed(self, done)

    def prefilled(self) -> None:
        """Its prompt is computed."""
        self.computed(self.tokens)

    def release(self) -> None:
        """It is over."""
        self.prefilled()
        if self._book is not None:
            self._book.own -= 1
            self._book = None
