"""What can be wrong with a pool, by name. Pure: from what routers and agents say, to findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from prefixpool.wire import Mode, State
from prefixpool_cli import disk_advice
from prefixpool_cli.admin import AgentAnswer
from prefixpool_router.pictures import Account
from prefixpool_router.state import ReplicaReport, RouterReport, StateReport

LOW_TRUST: Final = 0.5
UNAUTHORISED: Final = (401, 403)


class Severity(StrEnum):
    """How bad."""

    ERROR = "error"
    WARNING = "warning"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One problem: `cause` is its fixed name, `advice` what to do."""

    severity: Severity
    where: str
    cause: str
    words: str
    advice: str


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """One replica as one router process sees it, and what its agent says when asked directly."""

    router: str
    replica: ReplicaReport
    agent: AgentAnswer | None  # None: it was not asked

    @property
    def where(self) -> str:
        return f"{self.replica.name} (seen by {self.router})"


def examine(state: StateReport, agents: Mapping[str, AgentAnswer]) -> list[Finding]:
    """All findings, worst first; the same problem seen by several router processes is told once."""
    found: list[Finding] = []
    for worker in state.workers:
        found += _router(worker)
        subjects = [Subject(router=worker.name, replica=r, agent=agents.get(r.name)) for r in worker.replicas]
        found += [finding for subject in subjects for finding in _replica(subject)]
        found += _together(worker, subjects)
    unique = {(f.cause, f.where.split(" (")[0]): f for f in reversed(found)}
    return sorted(unique.values(), key=lambda f: (f.severity is not Severity.ERROR, f.where, f.cause))


def _router(worker: RouterReport) -> list[Finding]:
    found = []
    if worker.members_problem:
        found.append(
            _error(
                worker.name, "members", worker.members_problem, "the router goes on with the members it knew; correct them"
            )
        )
    if not worker.replicas:
        found.append(
            _error(
                worker.name, "no_replicas", "the router knows no replica", "give it --members FILE or --replica NAME=URL,URL"
            )
        )
    if not worker.ready and not worker.draining:
        found.append(_error(worker.name, "router_not_ready", worker.why or "it does not say why", "see the replicas below"))
    if worker.index_evictions:
        found.append(
            _warning(
                worker.name,
                "index_full",
                f"{worker.index_evictions} boundaries were dropped for lack of room",
                "give the router more --index-bytes",
            )
        )
    return found


def _replica(subject: Subject) -> list[Finding]:
    """Causes from the root upwards: where the engine is down, nothing else is worth telling."""
    roots: Sequence[Callable[[Subject], Finding | None]] = (
        _engine_key, _no_agent, _agent_unreachable, _wrong_key, _agent_version, _engine_down, _other_replica, _other_epoch,
    )  # fmt: skip
    for check in roots:
        finding = check(subject)
        if finding is not None:
            return [finding]
    checks: Sequence[Callable[[Subject], Finding | None]] = (
        _stale_stream, _warming, _no_events, _block_size, _template, _models, _drifted, _disk_tier, _not_usable,
    )  # fmt: skip
    return [finding for check in checks if (finding := check(subject)) is not None]


def _engine_key(s: Subject) -> Finding | None:
    if not s.replica.key_refused:
        return None
    return _error(
        s.where,
        "engine_key_refused",
        "its engine refuses the router's key, so nothing is sent there",
        "give both the same key; the router sends the first of its --engine-key-file",
    )


def _no_agent(s: Subject) -> Finding | None:
    if s.replica.agent:
        return None
    if not s.replica.usable:
        return _not_usable(s)
    words = "no agent is configured, so routing knows only what was sent there"
    return _warning(s.where, "no_agent", words, "name the agent in the member file to get precise routing")


def _agent_unreachable(s: Subject) -> Finding | None:
    if s.agent is None or s.agent.info is not None or s.agent.status:
        return None
    words = f"its agent at {s.replica.agent} cannot be reached: {s.agent.problem}"
    return _error(s.where, "agent_unreachable", words, "is the worker running? its agent.log says why the agent ends")


def _wrong_key(s: Subject) -> Finding | None:
    if s.agent is None or s.agent.status not in UNAUTHORISED:
        return None
    return _error(
        s.where,
        "key_mismatch",
        f"its agent refuses our engine key (it {s.agent.problem})",
        "routers, agents and engines of a pool read the same key file; `--engine-key-file` is the one doctor uses",
    )


def _agent_version(s: Subject) -> Finding | None:
    if s.agent is None or s.agent.info is not None:
        return None
    return _error(s.where, "agent_version", f"its agent {s.agent.problem}", "run the same version of agents and routers")


def _engine_down(s: Subject) -> Finding | None:
    info = s.agent.info if s.agent else None
    state = info.state if info else s.replica.engine_state
    reason = (info.reason if info else "") or s.replica.why
    match state:
        case State.FAILED:
            return _error(s.where, "engine_failed", f"the engine was given up: {reason}", "its engine.log has the rest")
        case State.STARTING:
            return _warning(
                s.where, "engine_starting", f"the engine is starting: {reason}", "wait; engine.log shows how far it is"
            )
        case State.STOPPED:
            return _warning(
                s.where, "engine_stopped", f"the engine was stopped: {reason}", "start it, or remove the replica"
            )
        case State.FENCED:
            return _warning(
                s.where, "fenced", "the replica drains and takes nothing new", "DELETE /drain of its agent undoes that"
            )
        case State.READY | None:
            return None


def _other_replica(s: Subject) -> Finding | None:
    info = s.agent.info if s.agent else None
    if info is None or info.replica == s.replica.name:
        return None
    words = f"the agent at {s.replica.agent} belongs to {info.replica}"
    return _error(s.where, "wrong_agent", words, "correct the addresses in the member file")


def _other_epoch(s: Subject) -> Finding | None:
    info = s.agent.info if s.agent else None
    if info is None or not s.replica.epoch or info.epoch == s.replica.epoch:
        return None
    words = "the router still speaks of an engine start before the last one"
    return _error(s.where, "stale_epoch", words, "if it stays so for seconds: the stream between router and agent is stuck")


def _stale_stream(s: Subject) -> Finding | None:
    if s.replica.account is not Account.NONE:
        return None
    lost = f"{s.replica.stream_losses} lost: {s.replica.mode_why}"
    answers = "its agent answers, but " if s.agent is not None else ""
    words = f"{answers}the router has no live stream from its agent ({lost})"
    return _error(
        s.where, "stale_stream", words, "the router's log says why the connection ends; do both have the same key?"
    )


def _warming(s: Subject) -> Finding | None:
    if s.replica.account is not Account.WARMING:
        return None
    words = "the router is still reading the first picture of its cache"
    return _warning(s.where, "warming", words, "a large cache takes a second or two; longer means a slow network")


def _no_events(s: Subject) -> Finding | None:
    info = s.agent.info if s.agent else None
    if info is None or info.mode is Mode.PRECISE:
        return None
    words = f"its agent gets no KV events, mode {info.mode}: {info.reason}"
    return _error(
        s.where, "no_events", words, "the engine must run with KV events over ipc, as `prefixpool-worker` starts it"
    )


def _block_size(s: Subject) -> Finding | None:
    info = s.agent.info if s.agent else None
    if info is None or not info.block_tokens or not s.replica.block_tokens or info.block_tokens == s.replica.block_tokens:
        return None
    words = f"the router counts blocks of {s.replica.block_tokens} tokens, the agent of {info.block_tokens}"
    return _error(s.where, "block_size_mismatch", words, "the stream is older than the engine; restart the router")


def _template(s: Subject) -> Finding | None:
    info = s.agent.info if s.agent else None
    if info is None or info.template.digest:
        return None
    words = "its agent could not read the model's chat template, so chats may be cut at wrong places"
    return _warning(s.where, "template_unknown", words, "the agent needs the model folder (tokenizer_config.json)")


def _models(s: Subject) -> Finding | None:
    info = s.agent.info if s.agent else None
    if info is None or set(info.models) == set(s.replica.models):
        return None
    words = f"the router believes it serves {_list(s.replica.models)}, its agent says {_list(info.models)}"
    return _error(s.where, "models_mismatch", words, "the stream is older than the engine; restart the router")


def _drifted(s: Subject) -> Finding | None:
    if not s.replica.drifted and s.replica.trust >= LOW_TRUST:
        return None
    consequence = "routed by history until they agree" if s.replica.drifted else "hits expected there count for less"
    words = f"predictions differ from what the engine reports (trust {s.replica.trust:.2f}): {consequence}"
    advice = "usual causes: a template that differs between replicas, or an engine that others use directly"
    return _warning(s.where, "predictions_drift", words, advice)


def _disk_tier(s: Subject) -> Finding | None:
    info = s.agent.info if s.agent else None
    problem = info.disk if info is not None else s.replica.disk
    if problem is None:
        return None
    words = f"its disk tier fails, so that it computes again what it should have kept: {problem.words}"
    return _warning(s.where, f"disk_{problem.cause}", words, disk_advice.OF[problem.cause])


def _not_usable(s: Subject) -> Finding | None:
    if s.replica.usable:
        return None
    return _error(
        s.where, "not_usable", f"the router sends nothing there: {s.replica.why}", "see its agent.log and engine.log"
    )


def _together(worker: RouterReport, subjects: Iterable[Subject]) -> list[Finding]:
    """What only shows when replicas are compared."""
    infos = [s.agent.info for s in subjects if s.agent and s.agent.info]
    compared = (
        ("template_mismatch", "chat templates", {i.template for i in infos}, "give all replicas the same model folder"),
        (
            "block_size_differs",
            "block sizes",
            {i.block_tokens for i in infos},
            "start all replicas with the same block size",
        ),
        ("models_differ", "served models", {i.models for i in infos}, "prefixes of one model are of no use to another"),
        ("engine_versions_differ", "engine versions", {i.engine_version for i in infos}, "finish the roll-out"),
    )
    return [
        _warning(worker.name, cause, f"replicas have {len(values)} different {what}", advice)
        for cause, what, values, advice in compared
        if len(values) > 1
    ]


def _list(words: Iterable[str]) -> str:
    return ", ".join(words) or "nothing"


def _error(where: str, cause: str, words: str, advice: str) -> Finding:
    return Finding(severity=Severity.ERROR, where=where, cause=cause, words=words, advice=advice)


def _warning(where: str, cause: str, words: str, advice: str) -> Finding:
    return Finding(severity=Severity.WARNING, where=where, cause=cause, words=words, advice=advice)
