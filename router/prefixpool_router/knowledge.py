"""What one replica is believed to hold: one column of the index (facts) and of the overlay (promises).

A dispatched request promises its prefix to the replica at once, so that the next request for the same text follows it while
the first is still being computed. Where an agent tells facts, a promise ends shortly after its request; where none does,
promises are all there is, and last for the history's time to live.

A closed picture ignores everything: late frames of a replica that left, or a request that ends after an engine restart,
change nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from prefixpool.index import PrefixIndex, capacity
from prefixpool.levels import Walk
from prefixpool.predicted import NOTHING, Predicted
from prefixpool.wire import Tier

USUAL_COLUMNS: Final = 64  # replicas that the memory of one boundary is reckoned for
PROMISE_BYTES: Final = 260  # of a boundary in the overlay (two dict slots), or of a request (its ticket and its end)
CONFIRM_S: Final = 1.0  # after its end, by when the agent must have told; events come within milliseconds
LONGEST_REQUEST_S: Final = 3600.0  # a promise of a running request ends then, whatever became of it


class Knowledge:
    """Facts and promises of all replicas; half of the memory for each, since a pool without agents has promises only."""

    def __init__(self, budget_bytes: int) -> None:
        self.index = PrefixIndex(capacity(budget_bytes // 2, USUAL_COLUMNS))
        self.predicted = Predicted(budget_bytes // 2 // PROMISE_BYTES)

    def walk(self, hashes: Sequence[int], block_tokens: int) -> Walk:
        """Holders of a prefix, promises included."""
        return self.index.walk(hashes, block_tokens, self.predicted.marks)


class Picture:
    """One replica's column. No clock: times are handed in, in seconds of any one clock."""

    def __init__(self, knowledge: Knowledge, store: str = "") -> None:
        """`store`: see `mount`."""
        self._knowledge = knowledge
        self._column = knowledge.index.open_column()
        self._lingering: deque[tuple[float, int]] = deque()  # (deadline, ticket) of requests that ended well
        self.closed = False
        self.mount(store)

    @property
    def bit(self) -> int:
        """The column's bit in `Level` masks; 0: closed."""
        return 0 if self.closed else 1 << 3 * self._column

    @property
    def boundaries(self) -> int:
        """Facts."""
        return 0 if self.closed else self._knowledge.index.count(self._column)

    @property
    def promised(self) -> int:
        """Boundaries on promises."""
        return 0 if self.closed else self._knowledge.predicted.count(self._column)

    def depth(self, boundary: int) -> int:
        """Token depth of a boundary if it is resident here as a fact; else 0."""
        return self._knowledge.index.depth(boundary, self.bit)

    def close(self) -> None:
        """Forget everything at once; the index cleans up in small steps (`PrefixIndex.sweep`)."""
        if not self.closed:
            self.closed = True
            self._lingering.clear()
            self._knowledge.predicted.drop_column(self._column)
            self._knowledge.index.drop_column(self._column)

    def mount(self, store: str) -> None:
        """Its disk is this store, which others may have, too; "": its own."""
        if not self.closed:
            self._knowledge.index.mount(self._column, store)

    def publish(self, hashes: Sequence[int], depths: Sequence[int], tier: Tier) -> None:
        """The agent's word: these are resident."""
        if not self.closed:
            self._knowledge.index.add(self._column, hashes, depths, tier)

    def retract(self, hashes: Sequence[int], tier: Tier) -> None:
        """The agent's word: these are gone, whatever requests that have ended made us expect."""
        if self.closed:
            return
        self._knowledge.index.remove(self._column, hashes, tier)
        if self._lingering and (gone := self._knowledge.predicted.about(self._column, hashes)):
            self._withdraw(gone)

    def promise(self, hashes: Sequence[int], depths: Callable[[int], Sequence[int]], until: float) -> Promise:
        """A request with these boundaries was sent there. `depths`: see `Predicted.add`."""
        ticket = NOTHING if self.closed else self._knowledge.predicted.add(self._column, hashes, depths, until)
        return Promise(self, ticket)

    def expire(self, now: float) -> None:
        """End the promises of requests that ended `CONFIRM_S` ago; overlay deadlines are `Predicted.expire`'s."""
        while self._lingering and self._lingering[0][0] <= now:
            self.end(self._lingering.popleft()[1])

    def _withdraw(self, gone: set[int]) -> None:
        """End promises of ended requests that name any of these: the agent has told of them already, and goes on telling."""
        predicted = self._knowledge.predicted
        void = {ticket for _, ticket in self._lingering if predicted.concerns(ticket, gone)}
        for ticket in void:
            predicted.remove(ticket)
        self._lingering = deque(each for each in self._lingering if each[1] not in void)

    def linger(self, ticket: int, until: float) -> None:
        """End a promise at that time; times only grow."""
        if not self.closed:
            self._lingering.append((until, ticket))

    def end(self, ticket: int) -> None:
        """End a promise now."""
        if not self.closed and ticket != NOTHING:
            self._knowledge.predicted.remove(ticket)


class Promise:
    """The promise of one request; the first of `confirm_by`, `keep` and `undo` counts."""

    __slots__ = ("_picture", "_ticket")

    def __init__(self, picture: Picture, ticket: int) -> None:
        self._picture: Picture | None = picture
        self._ticket = ticket

    def confirm_by(self, until: float) -> None:
        """Served by a replica whose agent tells facts: those take over."""
        if picture := self._take():
            picture.linger(self._ticket, until)

    def keep(self) -> None:
        """Served by a replica without facts: believed until the deadline given at the start."""
        self._take()

    def undo(self) -> None:
        """Came to nothing."""
        if picture := self._take():
            picture.end(self._ticket)

    def _take(self) -> Picture | None:
        picture, self._picture = self._picture, None
        return picture
