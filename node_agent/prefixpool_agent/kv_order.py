"""Which batch of KV events may be applied next: the bookkeeping behind `kv_events`, pure.

Batches of one engine start are numbered from 0. The publisher drops silently towards a slow subscriber, and a restarted
engine counts from 0 again (research: vllm.md 1.3).
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, Final, NamedTuple

import msgspec

END_MARKER: Final = b"\xff" * 8


class Verdict(Enum):
    """What a live batch means."""

    NEXT = auto()  # apply it
    GAP = auto()  # batches before it are missing: replay
    DUPLICATE = auto()  # a replay brought it already
    RESTARTED = auto()  # a lower number with a newer time: another engine


class Batch(NamedTuple):
    """One scheduler step's events. `at_s`: seconds since 1970, by the engine's clock."""

    at_s: float
    events: list[dict[str, Any]]
    rank: int


class Order:
    """The next expected number and the time of the last applied batch."""

    def __init__(self, next_seq: int = 0, last_s: float = 0.0) -> None:
        self.next_seq = next_seq
        self.last_s = last_s

    def judge(self, seq: int, at_s: float) -> Verdict:
        """Place a live batch."""
        if seq == self.next_seq:
            return Verdict.NEXT
        if seq > self.next_seq:
            return Verdict.GAP
        return Verdict.DUPLICATE if at_s <= self.last_s else Verdict.RESTARTED

    def applied(self, seq: int, at_s: float) -> None:
        """The batch is in."""
        self.next_seq = seq + 1
        self.last_s = max(self.last_s, at_s)

    def skip_to(self, seq: int) -> None:
        """Give up everything before `seq`."""
        self.next_seq = seq

    def restart(self) -> None:
        """Another engine: numbers begin again."""
        self.next_seq = 0
        self.last_s = 0.0


_batch = msgspec.msgpack.Decoder(list[Any])


def decode_batch(payload: bytes) -> Batch:
    """`[at, [event, ...], rank?]`; events are maps since vLLM 0.32. Raises ValueError."""
    parts = _batch.decode(payload)  # msgspec.DecodeError is a ValueError
    if len(parts) < 2 or not isinstance(parts[1], list) or not isinstance(parts[0], float | int):
        raise ValueError("not a batch of KV events")
    events = [event for event in parts[1] if isinstance(event, dict)]
    if len(events) != len(parts[1]):
        raise ValueError("KV events are not maps: this engine's version speaks another event format")
    rank = parts[2] if len(parts) > 2 and isinstance(parts[2], int) else 0
    return Batch(float(parts[0]), events, rank)


def number(frame: bytes) -> int:
    """A batch's sequence number. Raises ValueError."""
    if len(frame) != 8:
        raise ValueError("sequence number is not 8 bytes")
    return int.from_bytes(frame, "big")
