"""Reads all that `plan()` may look at, of one pool, from the API server itself: no cache can be behind.

Secrets are read by name, never listed, and their values go no further than the agents that they open.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from prefixpool.wire import Info
from prefixpool_operator import kube
from prefixpool_operator.agents import Agents
from prefixpool_operator.controller import PoolKey
from prefixpool_operator.hindrances import subjects
from prefixpool_operator.identity import KEY_ENGINE, L_POOL, Identity, key_of
from prefixpool_operator.inventory import Inventory
from prefixpool_operator.kube import ForbiddenError, KubeApi, NotFoundError, Resource
from prefixpool_operator.observed import Key, Observed, Raw, Settings


class _Keys(NamedTuple):
    """The pool's Secret, without values, and what its agents ask for."""

    secret: Raw | None = None
    engine: str = ""
    foreign: bool = False  # the name is somebody else's


class Observer:
    """`now` is the wall clock, seconds since 1970. `kinds`: what a pool's children may be, Secrets apart."""

    def __init__(
        self,
        api: KubeApi,
        inventory: Inventory,
        agents: Agents,
        *,
        kinds: tuple[Resource, ...],
        settings: Settings,
        now: Callable[[], float],
    ) -> None:
        self._api = api
        self._inventory = inventory
        self._agents = agents
        self._kinds = kinds
        self._settings = settings
        self._now = now

    async def observe(self, key: PoolKey, suspects: frozenset[Key]) -> Observed | None:
        """None: the pool is gone. `suspects` are names that somebody else's object had before. Raises KubeError."""
        try:
            pool = await self._api.get(kube.POOL, *key)
        except NotFoundError:
            return None
        labels = f"{L_POOL}={key.name}"
        reads = (self._api.list_all(kind, key.namespace, labels=labels) for kind in (*self._kinds, kube.POD, kube.CLAIM))
        lists, keys, taken, nodes = await asyncio.gather(
            asyncio.gather(*reads), self._keys(pool), foreign(self._api, key, suspects), self._inventory.nodes()
        )
        *children, pods, claims = lists
        owned = [child for listed in children for child in listed] + ([keys.secret] if keys.secret else [])
        by_key = {key_of(child): child for child in owned}
        makers = ((kube.STATEFUL_SET.kind, key.name), ("Job", Identity.of(pool).inspection))
        stuck = subjects(map(by_key.get, makers), pods)
        infos, warnings = await asyncio.gather(self._infos(pods, keys.engine), self._warnings(key, stuck))
        return Observed(
            pool=pool,
            children=by_key,
            taken=taken | ({(kube.SECRET.kind, Identity.of(pool).keys)} if keys.foreign else frozenset()),
            pods=tuple(pods),
            claims=tuple(claims),
            nodes=nodes,
            infos=infos,
            warnings=warnings,
            now_s=self._now(),
            settings=self._settings,
        )

    async def _infos(self, pods: list[Raw], key: str) -> Mapping[str, Info]:
        return await self._agents.infos(pods, key) if key else {}

    async def _warnings(self, key: PoolKey, uids: Iterable[str]) -> tuple[Raw, ...]:
        """() also where Events may not be read: they explain, and nothing is decided by them."""
        selectors = (f"involvedObject.uid={uid},type=Warning" for uid in uids)
        reads = (self._api.list_all(kube.EVENT, key.namespace, fields=one) for one in selectors)
        try:
            return tuple(event for listed in await asyncio.gather(*reads) for event in listed)
        except ForbiddenError:
            return ()

    async def _keys(self, pool: Raw) -> _Keys:
        identity = Identity.of(pool)
        try:
            secret = await self._api.get(kube.SECRET, identity.namespace, identity.keys)
        except NotFoundError:
            return _Keys()
        if not is_of(secret, identity.name):
            return _Keys(foreign=True)
        data = secret.get("data") or {}
        return _Keys({**secret, "data": dict.fromkeys(data, "")}, _text(data.get(KEY_ENGINE, "")))


async def foreign(api: KubeApi, key: PoolKey, names: Iterable[Key]) -> frozenset[Key]:
    """Those names that an object has which is not the pool's. Raises KubeError."""

    async def taken(kind: str, name: str) -> bool:
        try:
            return not is_of(await api.get(kube.resource_of(kind), key.namespace, name), key.name)
        except NotFoundError:
            return False

    asked = list(names)
    found = await asyncio.gather(*(taken(*one) for one in asked))
    return frozenset(one for one, is_taken in zip(asked, found, strict=True) if is_taken)


def is_of(obj: Raw, pool: str) -> bool:
    """Whether it bears the pool's label."""
    return (obj["metadata"].get("labels") or {}).get(L_POOL) == pool


def _text(encoded: str) -> str:
    """ "" for what is no base64 of text: then no agent is asked."""
    try:
        return base64.b64decode(encoded, validate=True).decode().strip()
    except (binascii.Error, UnicodeDecodeError):
        return ""
