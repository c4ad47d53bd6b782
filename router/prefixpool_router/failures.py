"""Why an attempt came to nothing, in the words that retries are decided by.

UnansweredError       nothing of this attempt has reached the client
├── RefusedError      no connection, so nothing was sent
├── ResetError        the connection broke; the engine may have begun to work
│   └── LostError     nothing comes, and the engine is known to be out of reach
├── SilentError       nothing came for too long
├── BusyError         the engine would not begin: fenced, out of room, or shutting down
├── EmptyError        a 200 without a single token, or cut short
└── KeyRefusedError   the engine does not take the key that this router sends
"""

from __future__ import annotations

from prefixpool.errors import PrefixpoolError


class UnansweredError(PrefixpoolError):
    """`why` is one word, also the label of a metric."""

    why = "unanswered"
    replica_down = False

    def __init__(self, message: str = "") -> None:
        super().__init__(message or self.why)


class RefusedError(UnansweredError):
    """No connection within its deadline, so nothing was sent."""

    why = "refused"
    replica_down = True


class ResetError(UnansweredError):
    """The connection broke, or what came is not HTTP; the engine may have begun to work on the request."""

    why = "reset"
    replica_down = True


class LostError(ResetError):
    """Nothing comes any more, and the engine was found to be out of reach: a process that hangs, a network that is cut."""

    why = "lost"
    replica_down = False  # known already


class SilentError(UnansweredError):
    """Nothing came for too long."""

    why = "timeout"


class BusyError(UnansweredError):
    """The engine would not begin: fenced, out of room, or shutting down."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class EmptyError(UnansweredError):
    """A 200 without a single token, or a whole answer that was cut short: the engine is shutting down."""

    why = "empty"


class KeyRefusedError(UnansweredError):
    """The engine does not take the key that this router sends. Clients' keys never reach it, so it is not about theirs."""

    why = "key_refused"
