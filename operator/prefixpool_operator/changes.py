"""Lists everything and says which pools look different from the last time: what watching missed is healed by this.

Only metadata is read: a list for each kind, and each pool's Secret by its name, because Secrets are neither listed nor
watched. So an idle cluster costs a dozen requests and a small one for each pool.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping
from itertools import chain
from typing import Final

from prefixpool_operator import kube
from prefixpool_operator.actions import FIELD_MANAGER
from prefixpool_operator.controller import PoolKey
from prefixpool_operator.identity import L_POOL, Identity
from prefixpool_operator.inventory import Inventory
from prefixpool_operator.kube import ForbiddenError, KubeApi, NotFoundError, Resource
from prefixpool_operator.observed import Node, Raw

_log = logging.getLogger(__name__)

EVERYWHERE: Final = ("",)  # namespaces: all
MANAGED: Final = f"app.kubernetes.io/managed-by={FIELD_MANAGER}"
_WHOLE_ROUNDS: Final = 10  # in which every pool is looked at, changed or not: agents are in no list here
_SECRETS_AT_ONCE: Final = 4  # what pools are waiting for comes between

_Versions = frozenset[tuple[str, str]]  # (uid, resource version) of a pool and all that is its


class Changes:
    """`namespaces`: those looked at, or EVERYWHERE. Other nodes concern every pool.

    A namespace that was named and may not be read is passed over as long as another one may: it was deleted, and the rights
    in it with it, and that must not end the care for all others.
    """

    def __init__(
        self, api: KubeApi, inventory: Inventory, *, namespaces: tuple[str, ...], kinds: tuple[Resource, ...]
    ) -> None:
        self._api = api
        self._inventory = inventory
        self._namespaces = namespaces
        self._kinds = kinds
        self._before: Mapping[PoolKey, _Versions] = {}
        self._nodes_before: tuple[Node, ...] | None = None
        self.passed_over: frozenset[str] = frozenset()  # namespaces
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
            if key.namespace not in self.passed_over
            and (moved or place % _WHOLE_ROUNDS == self._round or now.get(key) != before.get(key))
        ]

    async def known(self) -> tuple[str, ...]:
        """Namespaces that can be watched, or EVERYWHERE. KubeError: NotFoundError where the cluster has no such kind."""
        return tuple(await self._pools())

    async def _versions(self) -> Mapping[PoolKey, _Versions]:
        by_namespace = await self._pools()
        pools = [pool for listed in by_namespace.values() for pool in listed]
        children = await asyncio.gather(*(self._everywhere(kind, tuple(by_namespace)) for kind in self._kinds))
        children.append(await self._secrets(pools))
        found: dict[PoolKey, set[tuple[str, str]]] = {_own_key(pool): {_version(pool)} for pool in pools}
        belongings: dict[PoolKey, set[tuple[str, str]]] = defaultdict(set)
        for child in chain.from_iterable(children):
            belongings[owner(child)].add(_version(child))
        return {key: frozenset(own | belongings[key]) for key, own in found.items()}

    async def _pools(self) -> dict[str, list[Raw]]:
        """By namespace that may be read. Raises KubeError, ForbiddenError if there is none."""
        answers = await asyncio.gather(*map(self._pools_in, self._namespaces))
        refused = {one: answer for one, answer in answers if isinstance(answer, ForbiddenError)}
        if len(refused) == len(answers):
            raise next(iter(refused.values()))
        self.passed_over = frozenset(refused)
        if refused:  # each time: it may also be a name that is wrong, or a right that was forgotten
            why = {one: str(error) for one, error in refused.items()}
            _log.warning("namespaces may not be read, and are passed over", extra={"namespaces": why})
        return {one: answer for one, answer in answers if not isinstance(answer, ForbiddenError)}

    async def _pools_in(self, namespace: str) -> tuple[str, list[Raw] | ForbiddenError]:
        try:
            return namespace, await self._api.list_all(kube.POOL, namespace, metadata_only=True)
        except ForbiddenError as error:
            return namespace, error
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

    async def _everywhere(self, resource: Resource, namespaces: tuple[str, ...]) -> list[Raw]:
        lists = await asyncio.gather(
            *(self._api.list_all(resource, place, labels=MANAGED, metadata_only=True) for place in namespaces)
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
