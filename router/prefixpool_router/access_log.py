"""One line for each request that has ended (`--access-log`): who asked, where it went, what was cached, how it ended.

Of what a client wrote there are its path, without the query, and its request id: no text, no tokens, no key. Lines are
bounded in length; those about requests that no replica saw, which anybody without a key can cause, in number, too.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final

from prefixpool_router.dispatch_types import Dispatch, Outcome

_log = logging.getLogger(__name__)
_LONGEST_PATH: Final = 200
_MOST_UNSEEN: Final = 100  # lines a second about requests that no replica saw
_NOT_PLAIN: Final = re.compile(r"[^\x21-\x7e]")  # would break a line, steer a terminal, or be no text at all


class Ended(StrEnum):
    """How a request ended. The three of engines are `broken_streams` of the metrics: the client has a part of the answer."""

    COMPLETE = "complete"  # the client has all of the answer, whatever its status
    REFUSED = "refused"  # by the router, or because no replica answered
    CLIENT_GONE = "client_gone"  # or cut off, because it took nothing of its answer
    STOPPED = "stopped"  # the router's own time to drain was over
    ROUTER_FAILED = "router_failed"
    ENGINE_RESET = "engine_reset"
    ENGINE_LOST = "engine_lost"
    ENGINE_TIMEOUT = "engine_timeout"


class Visit:
    """What is to be told of one request, noted by whoever learns it."""

    __slots__ = ("_dispatch", "_outcome", "attempts", "body_bytes", "ended", "first_byte_s", "path", "request_id", "scope")

    def __init__(self, request_id: str, path: str) -> None:
        self.request_id = request_id
        self.path = path  # as on the wire, without query
        self.scope = ""
        self.attempts = 0
        self.first_byte_s: float | None = None
        self.body_bytes = 0  # of the answer, handed to the client's connection
        self.ended: Ended | None = None
        self._dispatch: Dispatch | None = None
        self._outcome: Outcome | None = None

    @property
    def seen(self) -> bool:
        """A replica was asked."""
        return self._dispatch is not None

    def placed(self, dispatch: Dispatch) -> None:
        """An attempt begins."""
        self._dispatch = dispatch
        self.attempts += 1

    def answered(self, outcome: Outcome) -> None:
        """Only the first counts, as for bookings."""
        self._outcome = self._outcome or outcome

    def end(self, how: Ended) -> None:
        """Only the first counts: what follows from it is not how it ended."""
        self.ended = self.ended or how

    def fields(self, status: int, total_s: float) -> dict[str, Any]:
        """Of its line. What is not known is left out."""
        dispatch, outcome = self._dispatch, self._outcome
        told = {
            "request_id": self.request_id,
            "scope": self.scope or None,
            "path": plain(self.path),
            "status": status,
            "replica": dispatch and dispatch.replica,
            "reason": dispatch and dispatch.reason,
            "attempts": self.attempts or None,
            "predicted_tokens": dispatch and dispatch.predicted_tokens,
            "cached_tokens": outcome and outcome.cached_tokens,
            "prompt_tokens": outcome and outcome.prompt_tokens,
            "output_tokens": outcome and outcome.output_tokens,
            "first_byte_s": None if self.first_byte_s is None else round(self.first_byte_s, 6),
            "total_s": round(total_s, 6),
            "bytes": self.body_bytes,
            "ended": str(self.ended or Ended.COMPLETE),
        }
        return {name: value for name, value in told.items() if value is not None}


def plain(path: str) -> str:
    """Printable and short. What is no path may be anything, as a URL with a password in it: it is not told."""
    if not path.startswith("/"):
        return "-"
    return _NOT_PLAIN.sub("?", path[:_LONGEST_PATH]) + ("..." if len(path) > _LONGEST_PATH else "")


class AccessLog:
    """Of one process. `clock`: seconds."""

    def __init__(self, *, enabled: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._enabled = enabled
        self._clock = clock
        self._second = 0
        self._unseen = 0  # lines in this second about requests that no replica saw
        self._left_out = 0  # since the last line

    def write(self, visit: Visit, status: int, total_s: float) -> None:
        """A request has ended; `status`: 499 if its client went away."""
        if self._enabled and (visit.seen or self._has_room()):
            self._tell(visit.fields(status, total_s))

    def garbled(self, status: int) -> None:
        """What came was no HTTP, so nothing else is known of it."""
        if self._enabled and self._has_room():
            self._tell({"status": status, "ended": str(Ended.REFUSED)})

    def _tell(self, fields: dict[str, Any]) -> None:
        if self._left_out:
            fields["left_out"], self._left_out = self._left_out, 0
        _log.info("request", extra=fields)

    def _has_room(self) -> bool:
        if (second := int(self._clock())) != self._second:
            self._second, self._unseen = second, 0
        self._unseen += 1
        if self._unseen > _MOST_UNSEEN:
            self._left_out += 1
        return self._unseen <= _MOST_UNSEEN
