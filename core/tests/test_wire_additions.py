"""Agents and routers of two versions beside one another, as in a rolling upgrade: additions are no nonsense, nonsense is."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from prefixpool import wire
from prefixpool.wire import DiskCause, DrainPhase, Mode, State, Tier

# All that the first version of the wire asks of a message, and what it means. Fields that are added have defaults: what
# stands here never grows.
FIRST: dict[str, tuple[dict[str, Any], wire.FromAgent | wire.FromRouter]] = {
    "hello": ({}, wire.Hello()),
    "welcome": ({"replica": "p-0", "epoch": 1}, wire.Welcome(replica="p-0", epoch=1)),
    "snapshot_begin": ({"epoch": 1}, wire.SnapshotBegin(epoch=1)),
    "snapshot_end": ({"epoch": 1}, wire.SnapshotEnd(epoch=1)),
    "publish": ({"tier": 1, "hashes": b"", "depths": b""}, wire.Publish(tier=Tier.DEVICE, hashes=b"", depths=b"")),
    "retract": ({"tier": 3, "hashes": b""}, wire.Retract(tier=Tier.DISK, hashes=b"")),
    "load": ({}, wire.Load()),
    "costs": ({}, wire.Costs()),
    "status": ({"state": "ready", "epoch": 1}, wire.Status(state=State.READY, epoch=1)),
    "fence_ack": ({"epoch": 1}, wire.FenceAck(epoch=1)),
}
FIRST_INFO: dict[str, Any] = {
    **dict.fromkeys(("version", "replica", "engine", "engine_version", "reason"), ""),
    **dict.fromkeys(("epoch", "block_tokens", "device_blocks", "device_tokens", "host_bytes", "disk_bytes"), 0),
    **dict.fromkeys(("boundaries", "resident_blocks", "inflight", "running", "waiting", "restarts", "engine_pid"), 0),
    "uptime_s": 0.0,
    "state": "ready",
    "mode": "precise",
    "models": [],
    "template": {},
    "costs": {"type": "costs"},
    "drain": {},
}


def frame(kind: str, **fields: Any) -> bytes:
    return msgspec.msgpack.encode({"type": kind, **FIRST.get(kind, ({}, None))[0], **fields})


def read(kind: str, **fields: Any) -> Any:
    decode = wire.decode_from_router if kind in ("hello", "fence_ack") else wire.decode_from_agent
    return decode(frame(kind, **fields))


def read_info(**fields: Any) -> wire.Info:
    return msgspec.json.decode(msgspec.json.encode({**FIRST_INFO, **fields}), type=wire.Info)


@pytest.mark.parametrize("kind", FIRST)
def test_what_the_first_version_says_is_understood_for_ever(kind: str) -> None:
    assert read(kind) == FIRST[kind][1]


@pytest.mark.parametrize("kind", FIRST)
def test_a_field_that_was_added_later_is_passed_over(kind: str) -> None:
    assert read(kind, added={"later": [1, "two"]}) == FIRST[kind][1]


def test_messages_that_were_added_later_are_told_from_nonsense() -> None:
    later = msgspec.msgpack.encode({"type": "ledger", "state": 7, "tier": "far"})
    assert wire.decode_from_agent(later) == wire.decode_from_router(later) == wire.Unknown("message ledger")


@pytest.mark.parametrize("kind", ["publish", "retract"])
def test_what_is_in_a_tier_that_was_added_later_is_told_from_nonsense(kind: str) -> None:
    assert read(kind, tier=4) == wire.Unknown(f"{kind} of tier 4")


def test_values_that_were_added_later_mean_what_was_settled_before() -> None:
    told = read("status", state="sleeping", mode="guessed", disk={"cause": "stolen", "words": "it is gone"})
    assert told == wire.Status(
        state=State.FENCED,
        epoch=1,
        mode=Mode.APPROXIMATE,
        disk=wire.DiskProblem(cause=DiskCause.BROKEN, words="it is gone"),
    )


def test_an_operator_reads_what_older_and_newer_agents_say_of_themselves() -> None:
    assert read_info().state is State.READY
    info = read_info(state="sleeping", mode="guessed", drain={"phase": "handing_over"}, ports={"engine": 1})
    assert (info.state, info.mode, info.drain.phase) == (State.FENCED, Mode.APPROXIMATE, DrainPhase.WAITING)


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\xc1",
        msgspec.msgpack.encode([1]),
        msgspec.msgpack.encode({}),
        msgspec.msgpack.encode({"type": 7}),
        msgspec.msgpack.encode({"type": ""}),
        msgspec.msgpack.encode({"type": "Publish Me"}),
        msgspec.msgpack.encode({"type": "x" * 64}),
        msgspec.msgpack.encode({"type": "publish"}),
        frame("publish", tier="4"),
        frame("publish", tier=-1),
        frame("publish", hashes=[1]),
        frame("snapshot_begin", epoch="1"),
        frame("status", state=""),
        frame("status", state="READY"),
        frame("status", state="ready to go"),
        frame("status", state=3),
        frame("status", mode="x" * 64),
        frame("hello"),
    ],
)
def test_nonsense_is_refused_as_before(nonsense: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        wire.decode_from_agent(nonsense)


@pytest.mark.parametrize("nonsense", [frame("load"), frame("fence_ack", epoch="1"), frame("hello", version="1")])
def test_routers_that_speak_nonsense_are_refused_as_before(nonsense: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        wire.decode_from_router(nonsense)
