"""The pictures of one replica's cache: the agent's account (facts), and what was sent there (history).

At any time one of them is in use. Facts whose agent fell silent go on as history for a while: the engine still has most of
it. While facts have drifted from the truth, history is in use and facts are only compared, until they are right again.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from prefixpool.wire import Mode, Tier
from prefixpool_router.closed_loop import Trust
from prefixpool_router.knowledge import Knowledge, Picture


class Account(StrEnum):
    """How far the agent's account has come."""

    NONE = "none"
    WARMING = "warming"
    WHOLE = "whole"


class Pictures:
    """Pictures of one replica. No clock: times are handed in."""

    def __init__(self, knowledge: Knowledge, history_ttl_s: float) -> None:
        self.account = Account.NONE
        self.facts: Picture | None = None
        self.facts_trust = Trust()
        self.history: Picture | None = None
        self.history_trust = Trust()
        self.history_ttl_s = history_ttl_s
        self._knowledge = knowledge
        self._retired = False
        self._store = ""
        self._history_ends_s = float("inf")  # of facts that go on as history

    def in_use(self, mode: Mode) -> Picture | None:
        """Where promises go and predictions come from; opens a history where one is needed."""
        if mode is Mode.NONE or self._retired:
            return None
        if mode is Mode.PRECISE:
            return self.facts
        if self.history is None or self.history.closed:
            self._start_history(Picture(self._knowledge), Trust(), float("inf"))
        return self.history

    def bit(self, mode: Mode) -> int:
        """Column of the picture in use; 0 while nothing of it may be believed."""
        picture = self.in_use(mode)
        if picture is None or (mode is Mode.PRECISE and self.account is not Account.WHOLE):
            return 0
        return picture.bit

    def trust(self, mode: Mode) -> Trust:
        """Of the picture in use."""
        return self.facts_trust if mode is Mode.PRECISE else self.history_trust

    def begin(self) -> None:
        """A snapshot begins: forget everything."""
        self.forget()
        self.facts = Picture(self._knowledge, self._store)
        self.account = Account.WARMING

    def end(self) -> bool:
        """The snapshot is complete. False: there was none."""
        if self.account is not Account.WARMING:
            return False
        self.account = Account.WHOLE
        return True

    def mount(self, store: str) -> None:
        """Says the agent: its disk is this store, which others may have, too; "": its own."""
        self._store = store
        if self.facts is not None:
            self.facts.mount(store)

    def publish(self, hashes: Sequence[int], depths: Sequence[int], tier: Tier) -> None:
        """Resident now, says the agent."""
        if self.facts is not None:
            self.facts.publish(hashes, depths, tier)

    def retract(self, hashes: Sequence[int], tier: Tier) -> None:
        """Gone now, says the agent."""
        if self.facts is not None:
            self.facts.retract(hashes, tier)

    def agent_lost(self, now: float) -> None:
        """Nobody keeps the facts true any more."""
        if self.facts is None:
            return
        self.facts.mount("")  # of a shared disk, those who live tell
        if self.account is Account.WHOLE and self.history_ttl_s and not self.facts_trust.drifted:
            self._start_history(self.facts, self.facts_trust, now + self.history_ttl_s)
        else:
            self.facts.close()
        self.facts = None
        self.account = Account.NONE

    def engine_down(self) -> None:
        """Connections are refused: what was sent there is gone. Facts are the agent's to correct."""
        if self.history is not None:
            self.history.close()

    def new_epoch(self) -> None:
        """Another engine: earlier comparisons say nothing of it."""
        self.facts_trust = Trust()

    def forget(self) -> None:
        """Close every picture."""
        for picture in (self.facts, self.history):
            if picture is not None:
                picture.close()
        self.facts = self.history = None
        self.account = Account.NONE

    def retire(self) -> None:
        """Close every picture and open none again: the replica left, but requests to it may still end."""
        self.forget()
        self._retired = True

    def expire(self, now: float) -> bool:
        """Let what is too old lapse; True if the picture in use did."""
        for picture in (self.facts, self.history):
            if picture is not None:
                picture.expire(now)
        if self.history is None or self.history.closed or now < self._history_ends_s:
            return False
        self.history.close()
        return True

    def _start_history(self, picture: Picture, trust: Trust, ends_s: float) -> None:
        if self.history is not None:
            self.history.close()
        self.history, self.history_trust, self._history_ends_s = picture, trust, ends_s
