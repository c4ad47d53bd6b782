"""One reconcile of one pool: observe, plan, act, write the status if it changed, tell."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from msgspec.structs import replace

from prefixpool_operator.actions import Event, Plan
from prefixpool_operator.apply import Applier
from prefixpool_operator.controller import Outcome, PoolKey
from prefixpool_operator.events import EventPoster
from prefixpool_operator.kube import ConflictError, KubeError, NotFoundError, UnavailableError
from prefixpool_operator.observe import Observer, unlisted
from prefixpool_operator.observed import Key, Observed

_INTERNAL: Final = 500
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
        """Raises KubeError; the status is written also when an action failed."""
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
        except KubeError as error:
            if _lasting(error):
                self._refused[key] = str(error)
            await self._tell(observed, plan, plan.events)
            raise
        if surprises:  # what was planned without them is not worth telling
            self._suspects[key] = suspects | surprises
            return Outcome(wake_after_s=0.0)
        await self._tell(observed, plan, (*plan.done, *plan.events))
        if self._refused.pop(key, ""):
            return Outcome(wake_after_s=0.0)  # the status is to say so
        return Outcome(wake_after_s=plan.wake_after_s)

    async def _tell(self, observed: Observed, plan: Plan, events: Iterable[Event]) -> None:
        pool = observed.pool
        if plan.status_changed:
            try:
                await self._applier.write_status(pool, plan.status)
            except NotFoundError:
                return  # deleted meanwhile
        await self._events.post(pool, events)


def _lasting(error: KubeError) -> bool:
    """Whether the same again is likely to be answered likewise.

    Not if somebody wrote first, nor if the server is not well; but 500 is also its answer while a webhook cannot be reached.
    """
    return error.status == _INTERNAL or not isinstance(error, ConflictError | UnavailableError)
