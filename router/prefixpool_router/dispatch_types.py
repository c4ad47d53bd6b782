"""The seam between the HTTP edge and the routing half: a parsed request in, one attempt out, its outcome back.

The edge (app, proxy, stream) sees only these types; `dispatch.py` implements them on the fleet. Both sides run in one event
loop, nothing here blocks or awaits.

    dispatch ──▶ first_byte ──▶ finish          an answer, good or bad, went to the client
             └─▶ abandon                        nothing reached the client; the edge may try another replica

Exactly one of finish/abandon counts; later calls are no-ops. The edge calls one of them for every Dispatch it was given, on
every path, cancellation included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from prefixpool.errors import RequestError


class NotYetError(RequestError):
    """Nobody takes the request now, but somebody may at any moment: replicas are full, or this router has just started."""

    def __init__(self) -> None:
        super().__init__(503, "No replica can take this request yet.", code="no_replica", retry_after_s=1)


class EngineKeyError(RequestError):
    """502: the engines refuse the key that this router sends them. A client that was let in can do nothing about it."""

    def __init__(self) -> None:
        super().__init__(
            502,
            "The pool's engines refuse the key of its router; your own key is not in question. Whoever runs the pool has to "
            "give its router (--engine-key-file) and its engines the same key.",
            code="engine_key_refused",
        )


class RoutedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What routing may know of a request. Built once at the edge, after the edits; `body` is not to be changed."""

    path: str  # decoded, without query: "/v1/chat/completions"
    body: Mapping[str, Any] | None = None  # parsed JSON object as the client sent it; None: no chain, route by load
    body_bytes: bytes = b""  # as the engine will get it; empty when the body is streamed through unread
    scope_salt: str = ""  # part of the prefix chain; "" = one scope
    session: str = ""  # client's session, for the `session` policy; "" = none
    tenant: str = ""  # scope of the client's key
    reserve_s: float = 0.0  # the prompt is to be kept so long; 0: no longer than others
    steers_loading: bool = False  # its client says, and may say, what its engine loads: `kv_transfer_params`
    policy: str = ""  # wanted by the client, already allowed by the edge; unknown names: RequestError 400
    request_id: str = ""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt that reached the client ended. Token counts are None where the engine did not tell (not 0)."""

    status: int  # HTTP status sent to the client; 499: the client went away before one was sent
    prompt_tokens: int | None = None  # all of the prompt, cached ones included
    cached_tokens: int | None = None
    output_tokens: int | None = None
    error: str = ""  # one short phrase, free of prompt text; "" = complete answer
    aborted: bool = False  # the client went away


class Dispatch(Protocol):
    """One attempt on one replica; its load and predicted residency are booked until finish or abandon."""

    @property
    def replica(self) -> str: ...

    @property
    def engine_url(self) -> str:
        """Origin without a trailing slash."""
        ...

    @property
    def predicted_tokens(self) -> int:
        """Cached tokens expected, fixed at dispatch."""
        ...

    @property
    def kv_transfer_params(self) -> Mapping[str, Any]:
        """What the engine is told of loading and keeping, as a member of the body; empty: nothing."""
        ...

    @property
    def reason(self) -> str:
        """One word of policy.base.Reason."""
        ...

    @property
    def id(self) -> str: ...

    @property
    def lost(self) -> bool:
        """The replica's engine has been out of reach for some time: no answer that is silent will go on."""
        ...

    def first_byte(self) -> None:
        """Prefill is over: the first output arrived. Called at most once, and never for answers that are not streamed."""
        ...

    def finish(self, outcome: Outcome) -> None: ...

    def abandon(self, why: str, *, replica_down: bool) -> None:
        """Undo the booking. `replica_down`: it refused or reset the connection; False: it said fenced or busy,
        or refused the key."""
        ...


class Dispatcher(Protocol):
    """Chooses replicas."""

    def dispatch(self, request: RoutedRequest, exclude: frozenset[str] = frozenset()) -> Dispatch:
        """Choose and book. Raises RequestError: 503 nobody is left, 404 the model is unknown, 400 no such policy;
        EngineKeyError if that is why nobody is left.

        NotYetError if waiting may help; then `exclude` should not name those who were full.
        """
        ...

    def when_room(self, wake: Callable[[int], None]) -> None:
        """`wake` is called whenever so many requests might find room, or things changed in another way."""
        ...
