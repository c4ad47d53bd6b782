"""All replicas together: who may be chosen, with which numbers, and what is to be said when that changes. No I/O.

Every change ends in `judge` or `weigh` for one replica, which bring `candidates` up to date before the next request is
routed; there is no other state that could lag behind.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Final

import msgspec

from prefixpool.errors import RequestError
from prefixpool.listing import listed
from prefixpool.policy.candidates import UNKNOWN, Candidates
from prefixpool.wire import Mode, Template
from prefixpool_router.dispatch_types import EngineKeyError, NotYetError
from prefixpool_router.knowledge import Knowledge
from prefixpool_router.membership import Member
from prefixpool_router.metrics import RoutingMetrics
from prefixpool_router.replica import DEFAULT_BLOCK_TOKENS, Replica, Verdict

_log = logging.getLogger(__name__)
_RETRY_AFTER_S: Final = 1
_RETRY_EMPTY_AFTER_S: Final = 10  # a pool without replicas has to start one first
_NAMED: Final = 5  # replicas, or reasons, in one sentence
_ALL: Final = 1 << 30


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds."""

    history_ttl_s: float = 300.0
    agent_grace_s: float = 4.0
    warmup_s: float = 5.0
    served_models: tuple[str, ...] = ()  # of the pool, known before any replica is
    ready_without_replicas: bool = False


class Fleet:
    """Owner of replicas, candidates and knowledge. One event loop."""

    def __init__(
        self, knowledge: Knowledge, metrics: RoutingMetrics, settings: FleetSettings, clock: Callable[[], float]
    ) -> None:
        self.knowledge = knowledge
        self.replicas: dict[str, Replica] = {}
        self.candidates = Candidates()
        self.settings = settings
        self.template = Template()  # what most replicas' engines render
        self.block_tokens = DEFAULT_BLOCK_TOKENS
        self.clock = clock
        self.started_s = clock()
        self.known = False  # a set of members has come
        self._metrics = metrics
        self._verdicts: dict[str, Verdict] = {}
        self._evicted = 0
        self._warming = True
        self._full: set[str] = set()  # candidates with as many requests as their gates let in
        self.wake: Callable[[int], None] = _nobody_waits  # for requests that found all full: so many may try again

    # -- members

    def apply(self, members: Sequence[Member]) -> None:
        """Replace the set of members. A replica whose engine URL changed is another one."""
        self.known = True
        wanted = {member.name: member for member in members}
        for name, replica in list(self.replicas.items()):
            if name not in wanted or wanted[name].engine != replica.member.engine:
                self._remove(replica)
        for name, member in wanted.items():
            present = self.replicas.get(name)
            if present is None:
                self._add(member)
            elif present.member != member:
                present.joined(member)
        self.wake(_ALL)

    def verdict(self, name: str) -> Verdict:
        """The last one. Raises KeyError for unknown names."""
        return self._verdicts[name]

    def _add(self, member: Member) -> None:
        replica = Replica(member, self.knowledge, self, self.clock, history_ttl_s=self.settings.history_ttl_s)
        self.replicas[member.name] = replica
        _log.info("replica joined", extra={"replica": member.name, "engine": member.engine, "agent": member.agent or ""})
        self.judge(replica)

    def _remove(self, replica: Replica) -> None:
        del self.replicas[replica.name], self._verdicts[replica.name]
        self.candidates.remove(replica.name)
        self._full.discard(replica.name)
        replica.left()
        self._learn_pool()
        self._metrics.forget(replica.name)
        _log.info("replica left", extra={"replica": replica.name})

    # -- what replicas learn (watcher.Watcher)

    def judge(self, replica: Replica) -> None:
        """Bring candidates in line with the replica's verdict, and say so when it changed."""
        if self.replicas.get(replica.name) is not replica:
            return  # it left; a request of it may still end
        verdict = replica.verdict()
        previous, self._verdicts[replica.name] = self._verdicts.get(replica.name), verdict
        if previous is None or verdict[:2] != previous[:2]:
            self._changed(replica, verdict, previous)
        if verdict.usable:
            self._place(replica, verdict.mode)
            self.weigh(replica)

    def weigh(self, replica: Replica) -> None:
        """Bring the candidate's load, and how far predictions for it are believed, up to date."""
        if self.candidates.get(replica.name) is not replica.candidate:
            return
        mode = self._verdicts[replica.name].mode
        report, picture = replica.report, replica.pictures.in_use(mode)
        self.candidates.update(
            replica.name,
            inflight=replica.load.inflight,
            pending_tokens=replica.load.pending_tokens,
            free_tokens=report.free_blocks * replica.block_tokens if report is not None else UNKNOWN,
            resident=picture.boundaries + picture.promised if picture is not None else 0,
            trust=replica.pictures.trust(mode).trust,
        )
        self._fill(replica)

    def _fill(self, replica: Replica) -> None:
        room = replica.max_inflight - replica.load.inflight
        if replica.max_inflight and room <= 0:
            self._full.add(replica.name)
        else:
            self._full.discard(replica.name)
            self.wake(room if replica.max_inflight else _ALL)

    def snapshot_begun(self, replica: Replica) -> None:
        """Count it."""
        self._metrics.snapshots.labels(replica.name).inc()

    def stream_lost(self, replica: Replica) -> None:
        """Count it, unless it was cut because the replica left."""
        if self.replicas.get(replica.name) is replica:
            self._metrics.stream_losses.labels(replica.name).inc()

    def _changed(self, replica: Replica, verdict: Verdict, previous: Verdict | None) -> None:
        if verdict.usable and self.candidates.get(replica.name) is not replica.candidate:
            self.candidates.add(replica.candidate)
        elif not verdict.usable and self.candidates.get(replica.name) is replica.candidate:
            self.candidates.remove(replica.name)
            self._full.discard(replica.name)
            self.wake(_ALL)  # those who waited for it may now have nobody left to wait for
        self._learn_pool()
        if previous is None or verdict.mode is not previous.mode:
            self._metrics.mode_changes.labels(replica.name, verdict.mode).inc()
        worse = previous is not None and (
            verdict.usable < previous.usable or (verdict.mode is not Mode.PRECISE and previous.mode is Mode.PRECISE)
        )
        _log.log(
            logging.WARNING if worse else logging.INFO,
            "replica state changed",
            extra={
                "replica": replica.name,
                "usable": verdict.usable,
                "mode": str(verdict.mode),
                "why": verdict.why or verdict.mode_why,
            },
        )

    def _place(self, replica: Replica, mode: Mode) -> None:
        candidate, name = replica.candidate, replica.name
        bit = replica.pictures.bit(mode)
        device_tokens = replica.welcome.device_tokens if replica.welcome is not None else candidate.device_tokens
        if (bit, device_tokens) != (candidate.bit, candidate.device_tokens):
            self.candidates.set_place(name, bit=bit, device_tokens=device_tokens)
        if candidate.costs is not replica.costs:
            self.candidates.set_costs(name, replica.costs)

    def _learn_pool(self) -> None:
        told = [replica for replica in self.replicas.values() if replica.welcome is not None]
        if told:
            self.template = Counter(replica.template for replica in told).most_common(1)[0][0]
            self.block_tokens = max(replica.block_tokens for replica in told)

    # -- who may be chosen

    def eligible(self, model: str, exclude: Collection[str], *, light: bool = False) -> Candidates:
        """Usable replicas that serve the model ("" = any). `light`: no work, which full replicas take, too.

        Raises RequestError 503, 502 or 404, NotYetError if waiting may help; never returns an empty set.
        """
        unfit = {name for name in exclude if self.candidates.get(name)}
        if self._full and not light:
            unfit |= self._full
        if model:
            unfit |= {candidate.name for candidate in self.candidates if not _serves(self.replicas[candidate.name], model)}
        if len(unfit) < len(self.candidates):
            return self.candidates.without(unfit) if unfit else self.candidates
        full = () if light else self._full
        if any(not model or _serves(self.replicas[name], model) for name in full) or self._starting():
            raise NotYetError
        raise self._refusal(model)

    def _starting(self) -> bool:
        """This router does not know its replicas yet."""
        if self.candidates or self.clock() - self.started_s >= self.settings.warmup_s:
            return False
        return not self.known or not all(replica.settled for replica in self.replicas.values())

    def _refusal(self, model: str) -> RequestError:
        if model and not self._known_model(model):
            self._metrics.refusals.labels("unknown_model").inc()
            return RequestError(404, f"The model `{model}` does not exist.", code="model_not_found", param="model")
        if self.replicas and all(replica.reach.refuses_key for replica in self.replicas.values()):
            self._metrics.refusals.labels("key_refused").inc()
            return EngineKeyError()
        self._metrics.refusals.labels("no_replica").inc()
        if self.known and not self.replicas:
            message = "The pool has no replicas now."
            return RequestError(503, message, code="no_replica", retry_after_s=_RETRY_EMPTY_AFTER_S)
        return RequestError(503, "No replica can take this request now.", code="no_replica", retry_after_s=_RETRY_AFTER_S)

    def _known_model(self, model: str) -> bool:
        """Or not known to be unknown."""
        named = model in self.settings.served_models
        if not self.replicas:
            return named or not self.settings.served_models
        return named or any(_serves(replica, model) for replica in self.replicas.values())

    # -- time

    def tick(self, late_s: float) -> None:
        """Called a few times a second, `late_s` after it was due."""
        now = self.clock()
        self.knowledge.predicted.expire(now)
        for replica in self.replicas.values():
            replica.tick(now)
        if self._warming and now - self.started_s >= self.settings.warmup_s:
            self._warming = False
            self.wake(_ALL)
        self._metrics.loop_lag.set(late_s)

    def measure(self) -> None:
        """Bring gauges up to date; called when somebody reads them."""
        metrics, index = self._metrics, self.knowledge.index
        for name, replica in self.replicas.items():
            verdict = self._verdicts[name]
            for mode in Mode:
                metrics.mode.labels(name, mode).set(verdict.mode is mode)
            metrics.usable.labels(name).set(verdict.usable)
            metrics.inflight.labels(name).set(replica.load.inflight)
            metrics.own_inflight.labels(name).set(replica.load.own)
            metrics.trust.labels(name).set(replica.pictures.trust(verdict.mode).trust)
        usable = len(self.candidates)
        metrics.replicas.labels("yes").set(usable)
        metrics.replicas.labels("no").set(len(self.replicas) - usable)
        metrics.boundaries.set(len(index))
        evicted = index.evicted + self.knowledge.predicted.evicted
        metrics.evictions.inc(evicted - self._evicted)
        self._evicted = evicted

    # -- readiness

    def _reasons(self) -> str:
        """Why nobody is usable; replicas with the same reason together, and a few reasons of many."""
        by_reason: dict[str, list[str]] = {}
        for name, verdict in sorted(self._verdicts.items()):
            by_reason.setdefault(verdict.why, []).append(name)
        told = [f"{listed(names, _NAMED)}: {why}" for why, names in by_reason.items()]
        return listed(told, _NAMED, between="; ")

    def readiness(self, problem: str) -> tuple[bool, str]:
        """Whether clients should come here, and why (not). `problem`: the membership source's."""
        if not self.known:
            return False, f"members are not known yet: {problem}" if problem else "members are not known yet"
        if not self.candidates:
            why = "no usable replica: " + self._reasons() if self.replicas else "the pool has no members"
            return self.settings.ready_without_replicas and not self._starting(), why
        waiting = [name for name, replica in self.replicas.items() if not replica.settled]
        if waiting and self.clock() - self.started_s < self.settings.warmup_s:
            return False, f"warming: waiting for the pictures of {len(waiting)} of {len(self.replicas)} replicas"
        return True, f"{len(self.candidates)} of {len(self.replicas)} replicas usable"


def _nobody_waits(_places: int) -> None:
    """Until somebody does."""


def _serves(replica: Replica, model: str) -> bool:
    return not replica.models or model in replica.models
