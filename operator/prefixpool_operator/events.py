"""Posts Events. The same one again is counted, not repeated, whichever process says it.

Like every write, each asks first whether this process still leads.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable
from typing import Final

from prefixpool_operator import kube
from prefixpool_operator.actions import FIELD_MANAGER, Event
from prefixpool_operator.kube import AlreadyExistsError, KubeApi, KubeError
from prefixpool_operator.observed import Raw
from prefixpool_operator.timestamp import stamp

_log = logging.getLogger(__name__)

_MESSAGE_MOST: Final = 1024  # the API's limit


class EventPoster:
    """`now`: the wall clock, seconds since 1970."""

    def __init__(self, api: KubeApi, *, leads: Callable[[], bool], now: Callable[[], float]) -> None:
        self._api = api
        self._leads = leads
        self._now = now

    async def post(self, pool: Raw, events: Iterable[Event]) -> None:
        """An event that cannot be posted is logged: nothing may hang on it."""
        for event in events:
            if not self._leads():
                return  # whoever leads now sees the same, and says it
            try:
                await self._post(self._body(pool, event))
            except KubeError as error:
                _log.warning("an event was not posted", extra={"reason": event.reason, "error": str(error)})

    async def _post(self, body: Raw) -> None:
        try:
            await self._api.create(kube.EVENT, body)
        except AlreadyExistsError:
            namespace, name = body["metadata"]["namespace"], body["metadata"]["name"]
            count = int((await self._api.get(kube.EVENT, namespace, name)).get("count") or 1) + 1
            again = {"count": count, "lastTimestamp": body["lastTimestamp"]}
            await self._api.patch(kube.EVENT, namespace, name, again)

    def _body(self, pool: Raw, event: Event) -> Raw:
        meta = pool["metadata"]
        now = stamp(self._now())
        what = "\0".join((meta["uid"], event.type, event.reason, event.message))
        return {
            "apiVersion": kube.EVENT.api_version,
            "kind": kube.EVENT.kind,
            "metadata": {
                "name": f"{meta['name']}.{hashlib.sha256(what.encode()).hexdigest()[:16]}",
                "namespace": meta["namespace"],
            },
            "involvedObject": {
                "apiVersion": kube.POOL.api_version,
                "kind": kube.POOL.kind,
                "namespace": meta["namespace"],
                "name": meta["name"],
                "uid": meta["uid"],
            },
            "type": event.type,
            "reason": event.reason,
            "message": event.message[:_MESSAGE_MOST],
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
            "source": {"component": FIELD_MANAGER},
            "reportingComponent": FIELD_MANAGER,
        }
