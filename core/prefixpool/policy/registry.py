"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from prefixpool.errors import SettingsError
from prefixpool.policy.base import Policy
from prefixpool.policy.chwbl import BoundedHash
from prefixpool.policy.least_load import LeastLoad
from prefixpool.policy.prefix import Prefix
from prefixpool.policy.round_robin import RoundRobin
from prefixpool.policy.session import Session
from prefixpool.policy.uniform import Uniform


def policies() -> Mapping[str, Callable[[], Policy]]:
    """Name -> factory, in the order in which they are documented."""
    kinds: tuple[Callable[[], Policy], ...] = (Prefix, BoundedHash, LeastLoad, RoundRobin, Uniform, Session)
    return MappingProxyType({kind().name: kind for kind in kinds})


def named(name: str) -> Policy:
    """Raises SettingsError that names what is accepted."""
    known = policies()
    if name not in known:
        raise SettingsError(f"policy: {name!r} is not known; accepted: {', '.join(known)}")
    return known[name]()
