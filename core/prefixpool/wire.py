"""Messages between agent and router (WebSocket `/stream`, MessagePack) and the agent's control answers (JSON).

The router connects, sends `Hello`; the agent answers `Welcome`, then a snapshot (`SnapshotBegin`, any number of `Publish`,
`SnapshotEnd`), then deltas for as long as the connection lives. An agent that has just been restarted sends its snapshot
once it has caught up with its engine; until then the router goes on with what it remembers of this replica. Between
`SnapshotBegin` and `SnapshotEnd` the router must not trust what it holds of this replica ("warming"). A slow router is never
left with a hole: when its queue overflows the agent drops the queue and starts a new snapshot. `SnapshotBegin` always means:
forget everything known of this replica.

Boundary hashes travel as packed little-endian u64, token depths as packed little-endian u32 (`array('Q')`, `array('I')`
on little-endian hosts), because a snapshot of 100,000 boundaries is common and must decode in milliseconds.

Versioning: `VERSION` changes when an old reader would misread. On another one than its own the agent closes with code 4400
and says so; routers then go by what they sent. Additions do not change it, because while a pool is upgraded both sides of an
addition talk to one another, also by `/info`:

- a new field has a default, and is ignored where it is not known;
- a new message, and one about a new tier, is ignored where it is not known (`Unknown`);
- a new state, mode, cause or phase, which are words in lower case, is read as the one that its enum names for that. One that
  this would mislead needs a field of its own.

Whatever else does not fit is nonsense, and ends the stream.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Final, TypeVar, get_args

import msgspec

from prefixpool.wire_words import DiskCause as DiskCause
from prefixpool.wire_words import DrainPhase as DrainPhase
from prefixpool.wire_words import Mode as Mode
from prefixpool.wire_words import State as State
from prefixpool.wire_words import Tier as Tier
from prefixpool.wire_words import is_word

VERSION: Final = 1
CLOSE_VERSION: Final = 4400  # WebSocket close code: wire version not understood
CLOSE_UNAUTHORISED: Final = 4401
LOAD_INTERVAL_S: Final = 0.05  # load is sent on change, at most this often
HEARTBEAT_S: Final = 1.0  # and at least this often, so that silence means a dead agent
STALE_AFTER_S: Final = 2.5  # a stream silent for so long counts as lost: routers reach the new state within 2-3 s


class Template(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the model's chat template does to the text; part of the chain's seed (design: 4.1)."""

    digest: str = ""  # hash of the template text; "" = unknown
    renders_tools: bool = True  # False: the template ignores `tools`, so they are not part of the chain
    prints_date: bool = False  # True: the day (UTC, ISO) is part of the seed
    trims: bool = False  # True: the template strips message contents
    nfc: bool = False  # True: the tokenizer normalises text to Unicode NFC
    system_first: bool = False  # True: system text must come first, so vLLM moves all of it there in `/v1/messages`


class Hello(msgspec.Struct, frozen=True, tag="hello", kw_only=True, omit_defaults=True):
    """First frame, router to agent."""

    version: int = VERSION
    router: str = ""


class Welcome(msgspec.Struct, frozen=True, tag="welcome", kw_only=True, omit_defaults=True):
    """First frame, agent to router: who this is and how to build chains that match its residency."""

    version: int = VERSION
    replica: str
    epoch: int
    models: tuple[str, ...] = ()  # served names and adapters
    block_tokens: int = 0
    device_tokens: int = 0  # capacity of the device tier
    host_bytes: int = 0  # host memory as a tier below the device; 0: none
    max_inflight: int = 0  # the gate's bound; 0 = none
    template: Template = Template()


class SnapshotBegin(msgspec.Struct, frozen=True, tag="snapshot_begin", kw_only=True, omit_defaults=True):
    """Forget this replica's residency: a whole new picture follows."""

    epoch: int
    boundaries: int = 0  # how many will follow, for progress
    reason: str = ""  # "connected", "engine restarted", "events lost", "cache reset", "router too slow"


class SnapshotEnd(msgspec.Struct, frozen=True, tag="snapshot_end", kw_only=True, omit_defaults=True):
    """The picture is complete; from here on only changes."""

    epoch: int


class Publish(msgspec.Struct, frozen=True, tag="publish", kw_only=True, omit_defaults=True):
    """These boundaries are resident in `tier`, with their whole path from the root in it or nearer.

    From a replica whose disk is shared (`Status.store`), DISK means that the whole path is on that disk: so it holds for
    all who have the same, and is told whether or not this replica has the boundary nearer, too.
    """

    tier: Tier
    hashes: bytes  # packed u64
    depths: bytes  # packed u32, token depth of each boundary


class Retract(msgspec.Struct, frozen=True, tag="retract", kw_only=True, omit_defaults=True):
    """These boundaries are no longer resident in `tier`."""

    tier: Tier
    hashes: bytes


class Load(msgspec.Struct, frozen=True, tag="load", kw_only=True, omit_defaults=True):
    """Load of one replica, on change, at most every `LOAD_INTERVAL_S`; also the heartbeat."""

    inflight: int = 0  # requests inside the gate, all routers together
    running: int = 0  # decoding or prefilling, from the engine's metrics
    waiting: int = 0  # queued in the engine
    kv_usage: float = 0.0  # fraction of device blocks in use by running requests
    prefill_backlog_tokens: int = 0  # estimate: prompt tokens admitted and not yet prefilled
    free_blocks: int = 0  # device blocks neither in use nor cached


class Costs(msgspec.Struct, frozen=True, tag="costs", kw_only=True, omit_defaults=True):
    """Measured by the agent; seconds. Prefill of m uncached tokens behind c cached ones: p1*m + p2*m*(m + 2*c)."""

    prefill_s_per_token: float = 0.0  # p1; 0 = not measured yet
    prefill_s_per_token2: float = 0.0  # p2
    decode_step_s: float = 0.0  # one step with one sequence
    decode_step_s_per_sequence: float = 0.0
    output_tokens: float = 0.0  # mean length of an answer
    samples: int = 0
    host_s_per_token: float = 0.0  # bringing a token back from host memory; 0 = never done yet
    disk_s_per_token: float = 0.0  # from disk, the way through host memory included

    @property
    def load_s_per_token(self) -> float:
        """From the farthest tier that was ever read."""
        return self.disk_s_per_token or self.host_s_per_token


class DiskProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A disk tier that fails gives misses: requests go on, and compute what it should have kept."""

    cause: DiskCause
    words: str


class Status(msgspec.Struct, frozen=True, tag="status", kw_only=True, omit_defaults=True):
    """State of the engine and quality of the residency picture."""

    state: State
    epoch: int
    mode: Mode = Mode.PRECISE
    reason: str = ""  # why FAILED, or why not precise, in words for a person
    store: str = ""  # id of the directory that its disk tier shares with other replicas; "": it has none, or one of its own
    disk: DiskProblem | None = None  # None: its disk tier does what it should, or it has none


class FenceAck(msgspec.Struct, frozen=True, tag="fence_ack", kw_only=True, omit_defaults=True):
    """Router to agent: I send nothing new to this epoch any more."""

    epoch: int


FromAgent = Welcome | SnapshotBegin | SnapshotEnd | Publish | Retract | Load | Costs | Status
FromRouter = Hello | FenceAck


class Download(msgspec.Struct, frozen=True, kw_only=True):
    """A model's files on their way from the Hub. A cache that replicas share is measured as a whole."""

    model: str
    done_bytes: int = 0
    total_bytes: int = 0  # 0: not known yet
    problem: str = ""  # why it does not go on, in words for the pool's owner; it is tried again


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Of a worker's container, in bytes; 0: no limit, or not known. Pages of files do not count."""

    limit_bytes: int = 0
    used_bytes: int = 0
    most_used_bytes: int = 0  # since the agent started
    shared_limit_bytes: int = 0  # size of /dev/shm


class Info(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /info` (JSON): everything the operator and `doctor` ask a replica. Sizes in bytes, counts in tokens or blocks."""

    version: str
    replica: str
    engine: str  # "vllm" | "sim"
    engine_version: str
    epoch: int
    state: State
    reason: str
    mode: Mode
    models: tuple[str, ...]
    block_tokens: int
    device_blocks: int  # what the engine really allocated, usable ones: without the null block
    device_tokens: int
    host_bytes: int
    disk_bytes: int
    boundaries: int
    resident_blocks: int
    inflight: int
    running: int
    waiting: int
    restarts: int  # engine restarts since the supervisor started
    engine_pid: int
    uptime_s: float
    template: Template
    costs: Costs
    drain: DrainStatus
    download: Download | None = None  # None: the files are there
    memory: Memory = Memory()
    disk: DiskProblem | None = None  # None: its disk tier does what it should, or it has none


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /drain` (JSON). Idempotent: a second call returns the running drain. `stop=False` fences only."""

    timeout_s: float = 60.0
    stop: bool = True  # stop the engine at the end; False = fence, wait, leave it running
    wait: bool = False  # answer when done instead of at once (202)


class DrainStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /drain`, and the answer of `POST` and `DELETE /drain` (DELETE lifts a fence that has not stopped the engine)."""

    phase: DrainPhase = DrainPhase.NONE
    inflight: int = 0
    remaining_s: float = 0.0
    forced: bool = False  # the deadline cut requests off
    reason: str = ""


class Unknown(msgspec.Struct, frozen=True):
    """Stands for a message that a newer version may send, and this one can do nothing with: it is to be ignored."""

    what: str


class _Head(msgspec.Struct, frozen=True):
    type: str


class _Tiered(msgspec.Struct, frozen=True):
    tier: int


M = TypeVar("M")

_to_router = msgspec.msgpack.Decoder(FromAgent)
_to_agent = msgspec.msgpack.Decoder(FromRouter)
_head = msgspec.msgpack.Decoder(_Head)
_tiered = msgspec.msgpack.Decoder(_Tiered)
_encoder = msgspec.msgpack.Encoder()
_KNOWN: Final = frozenset(kind.__struct_config__.tag for kind in (*get_args(FromAgent), *get_args(FromRouter)))
_OF_A_TIER: Final = frozenset(kind.__struct_config__.tag for kind in (Publish, Retract))


def encode(message: FromAgent | FromRouter) -> bytes:
    """One WebSocket frame."""
    return _encoder.encode(message)


def decode_from_agent(frame: bytes) -> FromAgent | Unknown:
    """Raises msgspec.DecodeError (bad MessagePack) or msgspec.ValidationError (wrong shape)."""
    return _read(_to_router, frame)


def decode_from_router(frame: bytes) -> FromRouter | Unknown:
    """Raises msgspec.DecodeError or msgspec.ValidationError."""
    return _read(_to_agent, frame)


def _read(decoder: msgspec.msgpack.Decoder[M], frame: bytes) -> M | Unknown:
    try:
        return decoder.decode(frame)
    except msgspec.ValidationError:
        if found := _unknown(frame):
            return found
        raise


def _unknown(frame: bytes) -> Unknown | None:
    """None: no version would say that."""
    try:
        kind = _head.decode(frame).type
        if kind not in _KNOWN:
            return Unknown(f"message {kind}") if is_word(kind) else None
        tier = _tiered.decode(frame).tier if kind in _OF_A_TIER else 0
    except msgspec.ValidationError:
        return None
    return Unknown(f"{kind} of tier {tier}") if tier > max(Tier) else None


def pack_hashes(hashes: Sequence[int]) -> bytes:
    """Boundary hashes as little-endian u64."""
    return _little(array("Q", hashes)).tobytes()


def unpack_hashes(packed: bytes) -> array[int]:
    """Raises ValueError if the length is not a multiple of 8."""
    out = array("Q")
    out.frombytes(packed)
    return _little(out)


def pack_depths(depths: Sequence[int]) -> bytes:
    """Token depths as little-endian u32."""
    return _little(array("I", depths)).tobytes()


def unpack_depths(packed: bytes) -> array[int]:
    """Raises ValueError if the length is not a multiple of 4."""
    out = array("I")
    out.frombytes(packed)
    return _little(out)


def _little(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values.byteswap()
    return values
