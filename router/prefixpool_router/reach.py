"""What connections and probes tell of one engine, whatever its agent says."""

from __future__ import annotations

from enum import Enum
from typing import Final

LOST_S: Final = 5.0  # an engine that is back by then was only busy
FENCED_S: Final = 1.0  # how long a refusal by the gate counts when no agent says more
KEY_REFUSED: Final = "it refuses the key of this router: --engine-key-file and the engine's key differ"
_NEVER: Final = float("-inf")


class Key(Enum):
    """What is known of the key that this router sends to engines."""

    TAKEN = "taken"  # or nothing is known against it
    DOUBTED = "doubted"  # a request was answered with 401. Clients choose paths and bodies, so that alone costs no replica
    REFUSED = "refused"  # so was a probe


class Reach:
    """Of one replica's engine. `now` is the router's clock in seconds."""

    __slots__ = ("_down_epoch", "_fenced_until_s", "_gone_since_s", "down", "key")

    def __init__(self) -> None:
        self.down = ""  # why, if it is
        self.key = Key.TAKEN
        self._down_epoch = 0
        self._fenced_until_s = _NEVER
        self._gone_since_s: float | None = None  # since when it has answered nobody

    def problem(self, now: float) -> str:
        """Why nothing should be sent there; "" if nothing is known against it."""
        if self.down:
            return f"down: {self.down}"
        if self.refuses_key:
            return KEY_REFUSED
        return "it refused a request: fenced or stopping" if now < self._fenced_until_s else ""

    @property
    def refuses_key(self) -> bool:
        """And would answer, if the key were right."""
        return not self.down and self.key is Key.REFUSED

    def went_down(self, why: str, epoch: int) -> None:
        """A connection was refused or reset, or a probe failed, in this epoch of the engine."""
        self.down = why
        self._down_epoch = epoch

    def came_up(self) -> None:
        """A probe was answered."""
        self.down = ""
        self.key = Key.TAKEN

    def doubt_key(self) -> None:
        """A probe is to find out."""
        if self.key is Key.TAKEN:
            self.key = Key.DOUBTED

    def refused_key(self) -> None:
        """So it lives, but nothing can be sent there."""
        self.down = ""
        self.key = Key.REFUSED

    def was_fenced(self, now: float) -> None:
        """It refused a request as one on its way out does."""
        self._fenced_until_s = now + FENCED_S

    def told(self, epoch: int, *, ready: bool) -> None:
        """Its agent spoke, and knows better whether it is fenced. What is ready in a new epoch is not what was down."""
        self._fenced_until_s = _NEVER
        if ready and epoch > self._down_epoch:
            self.down = ""

    def note(self, now: float, *, answers_nobody: bool) -> None:
        """For `lost`."""
        self._gone_since_s = (self._gone_since_s or now) if answers_nobody else None

    def lost(self, now: float) -> bool:
        """It has answered nobody for some time: what is silent there will not go on."""
        return self._gone_since_s is not None and now - self._gone_since_s >= LOST_S

    def lapse(self, now: float) -> bool:
        """Let what is too old go; True if something did."""
        lapsed = _NEVER < self._fenced_until_s <= now
        if lapsed:
            self._fenced_until_s = _NEVER
        return lapsed
