"""One reconcile of one pool: observe, plan, act, write the status if it changed, tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from prefixpool_operator.actions import Plan
from prefixpool_operator.apply import Applier
from prefixpool_operator.controller import Outcome, PoolKey
from prefixpool_operator.events import EventPoster
from prefixpool_operator.kube import ForbiddenError, InvalidError, NotFoundError
from prefixpool_operator.observe import Observer, unlisted
from prefixpool_operator.observed import Key, Observed

_NONE: Final[frozenset[Key]] = frozenset()


class Reconciler:
    """Remembers nothing that matters: names to be looked at are found anew, and refusals are met again."""

    def __init__(self, observer: Observer, plan: Callable[[Observed], Plan], applier: Applier, events: EventPoster) -> None:
        self._observer = observer
        self._plan = plan
        self._applier = applier
        self._events = events
        self._suspects: dict[PoolKey, frozenset[Key]] = {}
        self._refused: dict[PoolKey, str] = {}

    async def reconcile(self, key: PoolKey) -> Outcome:
        """Raises KubeError; the status is written also when an action was refused."""
        observed = await self._observer.observe(key, self._suspects.pop(key, _NONE))
        if observed is None:
            self._refused.pop(key, None)
            return Outcome(gone=True)
        suspects = observed.taken | unlisted(observed)
        if suspects:
            self._suspects[key] = suspects
        plan = self._plan(replace(observed, refused=self._refused.get(key, "")))
        try:
            surprises = await self._applier.apply(observed.pool, plan.actions)
        except (ForbiddenError, InvalidError) as error:
            self._refused[key] = str(error)
            await self._tell(observed, plan)
            raise
        if surprises:  # what was planned without them is not worth telling
            self._suspects[key] = suspects | surprises
            return Outcome(wake_after_s=0.0)
        await self._tell(observed, plan)
        if self._refused.pop(key, ""):
            return Outcome(wake_after_s=0.0)  # the status is to say so
        return Outcome(wake_after_s=plan.wake_after_s)

    async def _tell(self, observed: Observed, plan: Plan) -> None:
        pool = observed.pool
        if plan.status_changed:
            try:
                await self._applier.write_status(pool, plan.status)
            except NotFoundError:
                return  # deleted meanwhile
        await self._events.post(pool, plan.events)
