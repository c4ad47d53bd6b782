"""Requests between their arrival and the moment when their boundaries are placed; bounded by number and bytes. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator

from prefixpool.chain import Canonical, PrefixChain
from prefixpool_agent.residency.answer import Answer
from prefixpool_agent.residency.block import Block
from prefixpool_agent.residency.limits import Limits


class Session:
    """One request. Its arrival, its events and its end come in any order, and any of them may be missing."""

    __slots__ = (
        "again",
        "answer",
        "arrived",
        "chain",
        "comparable",
        "full",
        "id",
        "last",
        "mapped_blocks",
        "next_blocks",
        "path",
        "predicted",
        "request",
    )

    def __init__(self, id_: str) -> None:
        self.id = id_
        self.arrived = False
        self.path = ""
        self.request: Canonical | None = None  # None: no arrival yet, or no prefix chain
        self.chain: PrefixChain | None = None
        self.full = False  # its events repeat blocks that it reuses
        self.comparable = False
        self.predicted: int | None = None
        self.last: Block | None = None  # deepest block that carried its id
        self.again: list[Block] = []  # blocks stored again before we know whether `full`
        self.answer: Answer | None = None  # None: still running
        self.mapped_blocks = 0  # length of the path when last mapped
        self.next_blocks = 0.0  # length at which mapping again pays; infinite once only the end can add something

    @property
    def content_bytes(self) -> int:
        """What it costs to keep."""
        return self.chain.total_bytes if self.chain else 0


class Sessions:
    """All requests that are not finished with, oldest first, and the ids of those that are."""

    def __init__(self, limits: Limits, counts: Counter[str]) -> None:
        self._limits = limits
        self._counts = counts
        self._live: OrderedDict[str, Session] = OrderedDict()
        self._late: OrderedDict[str, None] = OrderedDict()  # ended, events or room in the path still missing
        self._done: OrderedDict[str, bool] = OrderedDict()  # value: `full`
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._live)

    @property
    def content_bytes(self) -> int:
        """Texts held now."""
        return self._bytes

    def __iter__(self) -> Iterator[Session]:
        return iter(self._live.values())

    def get(self, id_: str) -> Session | None:
        """None: unknown or finished with."""
        return self._live.get(id_)

    def repeats(self, id_: str) -> bool | None:
        """Whether its events repeat what it reuses; None: its arrival is not known (yet)."""
        session = self._live.get(id_)
        if session is not None:
            return session.full if session.arrived else None
        return self._done.get(id_)

    def open(self, id_: str) -> Session | None:
        """The session, new if need be; None if it is finished with (a note that is sent again, a late event)."""
        session = self._live.get(id_)
        if session is None and id_ not in self._done:
            session = self._live[id_] = Session(id_)
            self._bound()
        return session

    def note(self, session: Session, request: Canonical, chain: PrefixChain) -> None:
        """Keep a request's texts."""
        session.request, session.chain = request, chain
        self._bytes += session.content_bytes
        self._bound()

    def late(self, session: Session) -> None:
        """Ended, but not all of its path is known: kept for a while, events may be on their way."""
        self._late[session.id] = None
        while len(self._late) > self._limits.late_sessions:
            oldest, _ = self._late.popitem(last=False)
            if gone := self._live.get(oldest):
                self._counts["sessions_unmapped" if not gone.mapped_blocks else "sessions_part_mapped"] += 1
                self.finish(gone)

    def finish(self, session: Session) -> None:
        """Forget it, its id apart."""
        if self._live.pop(session.id, None) is None:
            return
        self._late.pop(session.id, None)
        self._bytes -= session.content_bytes
        self._done[session.id] = session.full
        while len(self._done) > self._limits.sessions:
            self._done.popitem(last=False)

    def _bound(self) -> None:
        over = self._limits
        while len(self._live) > over.sessions or (self._bytes > over.content_bytes and len(self._live) > 1):
            oldest = next(iter(self._live.values()))
            self._counts["sessions_dropped" if oldest.arrived else "arrival_never_came"] += 1
            self.finish(oldest)
