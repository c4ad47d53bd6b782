"""Carries out what was planned, one action after the other. Decides nothing; the first refusal ends it.

Every write asks first whether this process still leads.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import assert_never

from prefixpool_operator import kube
from prefixpool_operator.actions import FIELD_MANAGER, Action, Apply, CreateOnce, Delete, FillReplicas, PatchImage
from prefixpool_operator.election import LeadershipLostError
from prefixpool_operator.identity import key_of
from prefixpool_operator.kube import AlreadyExistsError, ConflictError, Content, KubeApi, KubeError, NotFoundError
from prefixpool_operator.metrics import OperatorMetrics
from prefixpool_operator.observe import named
from prefixpool_operator.observed import Key, Raw

_log = logging.getLogger(__name__)


class Applier:
    """`secret` makes fresh random text for a key."""

    def __init__(
        self, api: KubeApi, *, leads: Callable[[], bool], secret: Callable[[], str], metrics: OperatorMetrics
    ) -> None:
        self._api = api
        self._leads = leads
        self._secret = secret
        self._metrics = metrics
        self._making: set[tuple[str, str, str]] = set()  # namespace, kind and name of what is about to be created

    async def apply(self, pool: Raw, actions: Sequence[Action]) -> frozenset[Key]:
        """Names that the plan took for free and are not: then nothing is done. KubeError: the first action that failed.

        They are looked at first instead of written by a create: fields of a create would stay when a later apply leaves
        them out. An apply by the same manager takes over without a conflict, so of two pools that need one name (`a` and
        `a-replicas` both have a Service `a-replicas`) only one makes it at a time.
        """
        namespace = pool["metadata"]["namespace"]
        absent = [key_of(action.object) for action in actions if isinstance(action, Apply) and action.absent]
        places = {(namespace, *name) for name in absent}
        if contested := places & self._making:
            return frozenset((kind, name) for _, kind, name in contested)
        self._making |= places
        try:
            if found := await named(self._api, namespace, absent):
                return frozenset(found)
            return await self._carry_out(pool, actions)
        finally:
            self._making -= places

    async def write_status(self, pool: Raw, status: Raw) -> None:
        """The whole status, which is nobody else's. Raises KubeError; ConflictError: it is another pool by now."""
        with self._writing("WriteStatus", kube.POOL.kind):
            await self._api.apply(kube.POOL, {**_stub(pool), "status": status}, manager=FIELD_MANAGER, subresource="status")

    async def _carry_out(self, pool: Raw, actions: Sequence[Action]) -> frozenset[Key]:
        about = {"pool": pool["metadata"]["name"], "namespace": pool["metadata"]["namespace"]}
        for action in actions:
            word, (kind, name) = type(action).__name__, target(action)
            _log.info(word, extra={**about, "object": f"{kind}/{name}", "why": action.reason})
            try:
                with self._writing(word, kind):
                    await self._do(pool, action)
            except ConflictError:
                if not (isinstance(action, Apply) and action.absent):
                    raise
                return frozenset({(kind, name)})  # somebody made it a moment ago
        return frozenset()

    async def _do(self, pool: Raw, action: Action) -> None:
        namespace = pool["metadata"]["namespace"]
        match action:
            case Apply():
                kind, force = kube.resource_of(action.object["kind"]), not action.absent
                await self._api.apply(kind, action.object, manager=FIELD_MANAGER, force=force)
            case CreateOnce():
                await self._create(action)
            case Delete():
                with suppress(NotFoundError, ConflictError):
                    await self._api.delete(kube.resource_of(action.kind), namespace, action.name, uid=action.uid)
            case PatchImage():
                await self._patch_image(namespace, action)
            case FillReplicas():
                body = {**_stub(pool), "spec": {"replicas": action.replicas}}
                with suppress(ConflictError):
                    await self._api.apply(kube.POOL, body, manager=FIELD_MANAGER, force=False)
            case _:
                assert_never(action)

    async def _create(self, action: CreateOnce) -> None:
        data = {key: base64.b64encode(self._secret().encode()).decode() for key in action.random_keys}
        with suppress(AlreadyExistsError):
            await self._api.create(kube.SECRET, {**action.object, "data": {**action.object.get("data", {}), **data}})

    async def _patch_image(self, namespace: str, action: PatchImage) -> None:
        body = {
            "metadata": {"uid": action.uid, "annotations": dict(action.annotations)},
            "spec": {"initContainers": [{"name": action.container, "image": action.image}]},
        }
        with suppress(NotFoundError, ConflictError):
            await self._api.patch(kube.POD, namespace, action.pod, body, content=Content.STRATEGIC)

    @contextmanager
    def _writing(self, action: str, kind: str) -> Iterator[None]:
        if not self._leads():
            raise LeadershipLostError("this process no longer leads, so it writes nothing")
        self._metrics.actions.labels(action, kind).inc()
        try:
            yield
        except KubeError:
            self._metrics.action_failures.labels(action, kind).inc()
            raise


def target(action: Action) -> Key:
    """What an action writes to."""
    match action:
        case Apply() | CreateOnce():
            return key_of(action.object)
        case Delete():
            return action.kind, action.name
        case PatchImage():
            return kube.POD.kind, action.pod
        case FillReplicas():
            return kube.POOL.kind, "spec.replicas"
        case _:
            assert_never(action)


def _stub(pool: Raw) -> Raw:
    """With the uid: a pool that was deleted meanwhile is not made anew, nor is its namesake touched."""
    meta = pool["metadata"]
    return {
        "apiVersion": kube.POOL.api_version,
        "kind": kube.POOL.kind,
        "metadata": {"name": meta["name"], "namespace": meta["namespace"], "uid": meta["uid"]},
    }
