"""Lists everything and says which pools look different from the last time: what watching missed is healed by this.

Only metadata is read: a list for each kind, and each pool's Secret by its name, because Secrets are neither listed nor
watched. So an idle cluster costs a dozen requests and a small one for each pool.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from itertools import chain
from typing import Final

from prefixpool_operator import kube
from prefixpool_operator.actions import FIELD_MANAGER
from prefixpool_operator.controller import PoolKey
from prefixpool_operator.identity import L_POOL, Identity
from prefixpool_operator.inventory import Inventory
from prefixpool_operator.kube import KubeApi, NotFoundError, Resource
from prefixpool_operator.observed import Node, Raw

MANAGED: Final = f"app.kubernetes.io/managed-by={FIELD_MANAGER}"
_WHOLE_ROUNDS: Final = 10  # in which every pool is looked at, changed or not: agents are in no list here
_SECRETS_AT_ONCE: Final = 4  # what pools are waiting for comes between

_Versions = frozenset[tuple[str, str]]  # (uid, resource version) of a pool and all that is its


class Changes:
    """`namespaces`: those looked at, ("",) for all. Other nodes concern every pool."""

    def __init__(
        self, api: KubeApi, inventory: Inventory, *, namespaces: tuple[str, ...], kinds: tuple[Resource, ...]
    ) -> None:
        self._api = api
        self._inventory = inventory
        self._namespaces = namespaces
        self._kinds = kinds
        self._before: Mapping[PoolKey, _Versions] = {}
        self._nodes_before: tuple[Node, ...] | None = None
        self._round = 0

    async def pools(self) -> list[PoolKey]:
        """Raises KubeError; then the next call compares with the last one that succeeded."""
        now, nodes = await self._versions(), await self._inventory.nodes()
        before, self._before = self._before, now
        moved, self._nodes_before = nodes != self._nodes_before, nodes
        self._round = (self._round + 1) % _WHOLE_ROUNDS
        return [
            key
            for place, key in enumerate(sorted(now.keys() | before.keys()))
            if moved or place % _WHOLE_ROUNDS == self._round or now.get(key) != before.get(key)
        ]

    async def known(self) -> None:
        """Raises KubeError: NotFoundError where the cluster has no such kind."""
        await self._pools()

    async def _versions(self) -> Mapping[PoolKey, _Versions]:
        pools, *children = await asyncio.gather(self._pools(), *(self._everywhere(kind, MANAGED) for kind in self._kinds))
        children.append(await self._secrets(pools))
        found: dict[PoolKey, set[tuple[str, str]]] = {_own_key(pool): {_version(pool)} for pool in pools}
        belongings: dict[PoolKey, set[tuple[str, str]]] = defaultdict(set)
        for child in chain.from_iterable(children):
            belongings[owner(child)].add(_version(child))
        return {key: frozenset(own | belongings[key]) for key, own in found.items()}

    async def _pools(self) -> list[Raw]:
        try:
            return await self._everywhere(kube.POOL, "")
        except NotFoundError as error:
            told = "this cluster does not know InferencePools: apply crds/, or set crds.enabled in the chart's values"
            raise NotFoundError(f"{told} ({error})", status=error.status, reason=error.reason) from error

    async def _secrets(self, pools: list[Raw]) -> list[Raw]:
        """As far as they exist."""
        turns = asyncio.Semaphore(_SECRETS_AT_ONCE)

        async def read(identity: Identity) -> list[Raw]:
            async with turns:
                try:
                    return [await self._api.get(kube.SECRET, identity.namespace, identity.keys, metadata_only=True)]
                except NotFoundError:
                    return []

        return list(chain.from_iterable(await asyncio.gather(*(read(Identity.of(pool)) for pool in pools))))

    async def _everywhere(self, resource: Resource, labels: str) -> list[Raw]:
        lists = await asyncio.gather(
            *(self._api.list_all(resource, place, labels=labels, metadata_only=True) for place in self._namespaces)
        )
        return [obj for listed in lists for obj in listed]


def owner(obj: Raw) -> PoolKey:
    """The pool that controls an object or, as for pods and claims, whose label it bears; the name is "" if there is none."""
    meta = obj["metadata"]
    controllers = (ref for ref in meta.get("ownerReferences") or () if ref.get("controller") and _is_pool(ref))
    name = next((ref["name"] for ref in controllers), (meta.get("labels") or {}).get(L_POOL, ""))
    return PoolKey(meta["namespace"], name)


def _is_pool(reference: Raw) -> bool:
    return bool(reference["kind"] == kube.POOL.kind and reference["apiVersion"].partition("/")[0] == kube.POOL.group)


def _own_key(pool: Raw) -> PoolKey:
    return PoolKey(pool["metadata"]["namespace"], pool["metadata"]["name"])


def _version(obj: Raw) -> tuple[str, str]:
    return obj["metadata"]["uid"], obj["metadata"]["resourceVersion"]
