"""What `/state` shows: every replica with what is known of it, and why."""

from __future__ import annotations

import msgspec

from prefixpool.wire import DiskProblem, Mode, State
from prefixpool_router.fleet import Fleet
from prefixpool_router.membership import MemberState
from prefixpool_router.pictures import Account
from prefixpool_router.replica import Replica


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """One replica as one router process sees it."""

    name: str
    engine: str
    agent: str | None
    member_state: MemberState
    usable: bool
    mode: Mode
    why: str  # it is not usable
    mode_why: str  # it is not precise, or warming
    account: Account  # how far the agent's account of the cache has come
    engine_state: State | None  # None: no agent says
    epoch: int
    models: tuple[str, ...]
    block_tokens: int
    device_tokens: int
    inflight: int  # of all routers
    own_inflight: int
    pending_tokens: int
    waiting: int | None  # None: no fresh report
    kv_usage: float | None
    boundaries: int  # facts in the index
    promised_boundaries: int
    trust: float
    prediction_error: float
    drifted: bool
    snapshots: int
    stream_losses: int
    costs: dict[str, float]  # wire.Costs
    load_s_per_token: dict[str, float] = {}  # by tier, as reckoned with: measured there, or what others measured
    store: str = ""  # id of the directory that its disk shares with others; "": none
    key_refused: bool = False  # its engine refuses the key of this router
    disk: DiskProblem | None = None  # what its agent says is wrong with its disk tier
    predicted_tokens: dict[str, int] = {}  # by tier: cached tokens expected of its answers, as the metric counts them


class RouterReport(msgspec.Struct, frozen=True, kw_only=True):
    """One router process. Sizes in bytes, times in seconds."""

    name: str
    worker: int
    pid: int
    ready: bool
    why: str
    draining: bool
    uptime_s: float
    policy: str
    members_problem: str
    index_boundaries: int
    index_bytes: int
    index_evictions: int
    promised_boundaries: int
    replicas: list[ReplicaReport]


class StateReport(msgspec.Struct, frozen=True, kw_only=True):
    """All processes of one router."""

    workers: list[RouterReport]


def replica_report(fleet: Fleet, replica: Replica) -> ReplicaReport:
    """Everything about one replica."""
    verdict, status, report = fleet.verdict(replica.name), replica.status, replica.report
    pictures = replica.pictures
    picture, trust = pictures.in_use(verdict.mode), pictures.trust(verdict.mode)
    return ReplicaReport(
        name=replica.name,
        engine=replica.member.engine,
        agent=replica.member.agent,
        member_state=replica.member.state,
        usable=verdict.usable,
        mode=verdict.mode,
        why=verdict.why,
        mode_why=verdict.mode_why,
        account=pictures.account,
        engine_state=status.state if status is not None else None,
        epoch=status.epoch if status is not None else 0,
        models=replica.models,
        block_tokens=replica.block_tokens,
        device_tokens=replica.candidate.device_tokens,
        inflight=replica.load.inflight,
        own_inflight=replica.load.own,
        pending_tokens=replica.load.pending_tokens,
        waiting=report.waiting if report is not None else None,
        kv_usage=report.kv_usage if report is not None else None,
        boundaries=picture.boundaries if picture is not None else 0,
        promised_boundaries=picture.promised if picture is not None else 0,
        trust=round(trust.trust, 4),
        prediction_error=round(trust.error, 4),
        drifted=pictures.facts_trust.drifted,
        snapshots=replica.snapshots,
        stream_losses=replica.losses,
        costs=msgspec.structs.asdict(replica.costs),
        load_s_per_token={
            "host": replica.candidate.rates.host_s_per_token,
            "disk": replica.candidate.rates.disk_s_per_token,
        },
        store=status.store if status is not None else "",
        key_refused=replica.reach.refuses_key,
        disk=status.disk if status is not None else None,
        predicted_tokens={tier.name.lower(): tokens for tier, tokens in replica.predicted.items()},
    )
