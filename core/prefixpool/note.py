"""Notes from the gate to the agent and commands back, over the unix stream socket `notes.sock` of the run directory.

A frame is a 4-byte big-endian length and a MessagePack array. The gate must cost the engine's API server next to nothing,
so it sends bodies as they are and parses neither requests nor answers; the agent does (it has its own process and, if need
be, its own core). Prompts never leave the machine: the socket is in a 0700 directory.

A connection begins with the greeting and the whole ring, oldest note first: an agent that comes back has lost what was in
the old socket. Notes therefore come more than once.

Order: notes of one API server process arrive in the order in which things happened, but relative to the engine's KV events
either may come first (measured: 1 in 221 events precede their note).
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

VERSION: Final = 1
LENGTH: Final = struct.Struct(">I")
MAX_FRAME_BYTES: Final = 16 << 20
MAX_BODY_BYTES: Final = 8 << 20  # longer requests or answers are noted without their body (`body=b""`, `cut=True`)
RING_NOTES: Final = 4096  # resent to an agent that comes back
RING_BYTES: Final = 64 << 20


class GateHello(msgspec.Struct, frozen=True, array_like=True, tag="H"):
    """First frame of every connection."""

    version: int
    epoch: int
    pid: int
    dropped: int = 0  # notes that fell out of the ring while nobody listened
    ring: int = 0  # notes that follow from the ring: behind them the agent is up to date


class Arrival(msgspec.Struct, frozen=True, array_like=True, tag="A"):
    """A request passed the gate. `id` is the label that its KV events carry as `session_id`."""

    id: str
    at_s: float  # time.monotonic() of the machine
    path: str
    body: bytes  # as the engine gets it, salt included
    full: bool = False  # the engine was asked to report reused blocks (kv_cache_report_mode=full)
    cut: bool = False


class End(msgspec.Struct, frozen=True, array_like=True, tag="E"):
    """The answer of a request is over, well or badly. `status` 0: nothing was answered (client gone, engine error)."""

    id: str
    first_s: float  # monotonic time of the first body chunk that carries content; 0 = none
    at_s: float
    status: int
    body: bytes  # as sent to the client: one JSON document, or a server-sent event stream
    cut: bool = False
    aborted: bool = False  # the client went away before the end


class CacheReset(msgspec.Struct, frozen=True, array_like=True, tag="R"):
    """`/reset_prefix_cache` succeeded. The engine itself publishes that only with its next step."""

    at_s: float
    external: bool = False  # lower tiers were reset, too


class Counts(msgspec.Struct, frozen=True, array_like=True, tag="C"):
    """In-flight requests changed; sent only when no Arrival or End says so (another process crashed, a fence was set)."""

    inflight: int
    fenced: bool


FromGate = GateHello | Arrival | End | CacheReset | Counts


class Resend(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """Send the ring of recent notes again, oldest first; then live ones."""


class Fence(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """Refuse new requests (503 `x-prefixpool-fenced`), or accept them again."""

    on: bool


class ReportFull(msgspec.Struct, frozen=True, array_like=True, tag="u"):
    """Ask the engine to re-announce reused blocks for the next `requests` requests (heals the residency picture)."""

    requests: int


ToGate = Resend | Fence | ReportFull

_encoder = msgspec.msgpack.Encoder()
_from_gate = msgspec.msgpack.Decoder(FromGate)
_to_gate = msgspec.msgpack.Decoder(ToGate)


def frame(message: FromGate | ToGate) -> bytes:
    """Length and payload, ready for the socket."""
    payload = _encoder.encode(message)
    return LENGTH.pack(len(payload)) + payload


def decode_from_gate(payload: bytes) -> FromGate:
    """Raises msgspec.DecodeError or msgspec.ValidationError."""
    return _from_gate.decode(payload)


def decode_to_gate(payload: bytes) -> ToGate:
    """Raises msgspec.DecodeError or msgspec.ValidationError."""
    return _to_gate.decode(payload)
