"""How a replica's cache is known, and why not better. Pure."""

from __future__ import annotations

from prefixpool import wire
from prefixpool.wire import Mode
from prefixpool_router.pictures import Account, Pictures


def cache_mode(
    welcome: wire.Welcome | None, status: wire.Status | None, pictures: Pictures, stream_problem: str
) -> tuple[Mode, str]:
    """The mode, and why it is not precise, or warming; "" if it is. `welcome` None: there is no living stream now."""
    problem = _imprecise(welcome, status, pictures, stream_problem)
    if not problem:
        return Mode.PRECISE, "warming" if pictures.account is Account.WARMING else ""
    if welcome is not None and status is not None and status.mode is Mode.NONE:
        return Mode.NONE, problem
    return (Mode.APPROXIMATE if pictures.history_ttl_s else Mode.NONE), problem


def _imprecise(welcome: wire.Welcome | None, status: wire.Status | None, pictures: Pictures, stream_problem: str) -> str:
    if welcome is None:
        return stream_problem
    if pictures.account is Account.NONE:
        return "its agent has sent no picture yet"
    if status is not None and status.mode is not Mode.PRECISE:
        return f"its agent is {status.mode}: {status.reason or 'no reason given'}"
    trust = pictures.facts_trust
    return f"predictions drifted: {trust.error:.0%} of cached tokens wrong" if trust.drifted else ""
