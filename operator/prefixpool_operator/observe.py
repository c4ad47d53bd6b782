"""Reads all that `plan()` may look at, of one pool, from the API server itself: no cache can be behind.

Secrets are read by name, never listed, and their values go no further than the agents that they open.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from prefixpool import engine_key
from prefixpool.errors import SettingsError
from prefixpool.wire import Info
from prefixpool_operator import kube
from prefixpool_operator.agents import Agents
from prefixpool_operator.controller import PoolKey
from prefixpool_operator.hindrances import subjects
from prefixpool_operator.identity import KEY_ENGINE, L_POOL, Identity, key_of
from prefixpool_operator.inventory import Inventory
from prefixpool_operator.kube import ForbiddenError, KubeApi, KubeError, NotFoundError, Resource
from prefixpool_operator.observed import Key, Observed, Raw, Settings

_log = logging.getLogger(__name__)


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
        self._told: dict[PoolKey, tuple[Raw, ...]] = {}  # warnings of the last look

    async def observe(self, key: PoolKey, suspects: frozenset[Key]) -> Observed | None:
        """None: the pool is gone. `suspects`: names that objects without the pool's label had before. Raises KubeError."""
        try:
            pool = await self._api.get(kube.POOL, *key)
        except NotFoundError:
            self._told.pop(key, None)
            return None
        identity, labels = Identity.of(pool), f"{L_POOL}={key.name}"
        asked = [name for name in suspects if name[0] != kube.SECRET.kind]  # the Secret is looked at in any case
        reads = (self._api.list_all(kind, key.namespace, labels=labels) for kind in (*self._kinds, kube.POD, kube.CLAIM))
        lists, keys, by_name, nodes = await asyncio.gather(
            asyncio.gather(*reads), self._keys(identity), named(self._api, key.namespace, asked), self._inventory.nodes()
        )
        *children, pods, claims = lists
        ours = {name: obj for name, obj in by_name.items() if is_of(obj, identity)}
        owned = [child for listed in children for child in listed] + ([keys.secret] if keys.secret else [])
        by_key = ours | {key_of(child): child for child in owned}
        foreign = (by_name.keys() - ours.keys()) | ({(kube.SECRET.kind, identity.keys)} if keys.foreign else set())
        makers = ((kube.STATEFUL_SET.kind, key.name), ("Job", identity.inspection))
        stuck = subjects(map(by_key.get, makers), pods)
        infos, warnings = await asyncio.gather(self._infos(pods, keys.engine), self._warnings(key, stuck))
        return Observed(
            pool=pool,
            children=by_key,
            taken=frozenset(foreign),
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
        """They explain; nothing is decided by them. () where they may not be read; while they cannot be, the last ones."""
        selectors = (f"involvedObject.uid={uid},type=Warning" for uid in uids)
        reads = (self._api.list_all(kube.EVENT, key.namespace, fields=one) for one in selectors)
        try:
            found = tuple(event for listed in await asyncio.gather(*reads) for event in listed)
        except ForbiddenError:
            return ()
        except KubeError as error:  # they may have a store of their own, and rollouts must not wait for that
            _log.info("Events cannot be read", extra={"pool": str(key), "error": str(error)})
            return self._told.get(key, ())
        self._told.pop(key, None)
        if found:
            self._told[key] = found
        return found

    async def _keys(self, identity: Identity) -> _Keys:
        try:
            secret = await self._api.get(kube.SECRET, identity.namespace, identity.keys)
        except NotFoundError:
            return _Keys()
        if not is_of(secret, identity):
            return _Keys(foreign=True)
        data = secret.get("data") or {}
        return _Keys({**secret, "data": dict.fromkeys(data, "")}, _key(data.get(KEY_ENGINE, "")))


async def named(api: KubeApi, namespace: str, names: Iterable[Key]) -> dict[Key, Raw]:
    """Objects that have these names, whoever made them. Raises KubeError."""

    async def read(kind: str, name: str) -> Raw | None:
        try:
            return await api.get(kube.resource_of(kind), namespace, name)
        except NotFoundError:
            return None

    asked = list(names)
    found = await asyncio.gather(*(read(*one) for one in asked))
    return {one: obj for one, obj in zip(asked, found, strict=True) if obj is not None}


def is_of(obj: Raw, identity: Identity) -> bool:
    """Whether it bears the pool's label, or lost that and still has the pool for its controller."""
    owners = obj["metadata"].get("ownerReferences") or ()
    return labelled(obj, identity.name) or any(ref["uid"] == identity.uid for ref in owners if ref.get("controller"))


def unlisted(observed: Observed) -> frozenset[Key]:
    """Children without the pool's label: only who asks for them by name finds them."""
    pool = observed.pool["metadata"]["name"]
    return frozenset(name for name, child in observed.children.items() if not labelled(child, pool))


def labelled(obj: Raw, pool: str) -> bool:
    """Whether a list of the pool's objects has it."""
    return (obj["metadata"].get("labels") or {}).get(L_POOL) == pool


def _key(encoded: str) -> str:
    """ "" for what is no base64 of a key: then no agent is asked."""
    try:
        return engine_key.sent(base64.b64decode(encoded, validate=True))
    except (binascii.Error, SettingsError):
        return ""
