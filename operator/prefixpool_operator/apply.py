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
from prefixpool_operator.controller import PoolKey
from prefixpool_operator.election import LeadershipLostError
from prefixpool_operator.identity import key_of
from prefixpool_operator.kube import AlreadyExistsError, ConflictError, Content, KubeApi, KubeError, NotFoundError
from prefixpool_operator.metrics import OperatorMetrics
from prefixpool_operator.observe import foreign
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

    async def apply(self, pool: Raw, actions: Sequence[Action]) -> frozenset[Key]:
        """Names that turned out to be somebody else's. Raises KubeError at the first action that fails."""
        theirs = await self._theirs(pool, actions)
        for action in actions:
            word, (kind, name) = type(action).__name__, target(action)
            if (kind, name) in theirs:
                continue
            about = {"pool": pool["metadata"]["name"], "namespace": pool["metadata"]["namespace"]}
            _log.info(word, extra={**about, "object": f"{kind}/{name}", "why": action.reason})
            with self._writing(word, kind):
                await self._do(pool, action)
        return theirs

    async def write_status(self, pool: Raw, status: Raw) -> None:
        """The whole status, which is nobody else's. Raises KubeError; ConflictError: it is another pool by now."""
        with self._writing("WriteStatus", kube.POOL.kind):
            await self._api.apply(kube.POOL, {**_stub(pool), "status": status}, manager=FIELD_MANAGER, subresource="status")

    async def _theirs(self, pool: Raw, actions: Sequence[Action]) -> frozenset[Key]:
        """Of what the plan does not know of: names that exist and are somebody else's.

        Looked at first instead of written by a create: fields of a create would stay when a later apply leaves them out.
        """
        absent = [key_of(action.object) for action in actions if isinstance(action, Apply) and action.absent]
        return await foreign(self._api, PoolKey(pool["metadata"]["namespace"], pool["metadata"]["name"]), absent)

    async def _do(self, pool: Raw, action: Action) -> None:
        namespace = pool["metadata"]["namespace"]
        match action:
            case Apply():
                await self._api.apply(kube.resource_of(action.object["kind"]), action.object, manager=FIELD_MANAGER)
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
