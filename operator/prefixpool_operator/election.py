"""One leader among several operators, by a Lease, with the rules of client-go's leader election.

Clocks of machines are never compared: how old a lease is counts from when this process saw it change. The leader counts
its own time from before it asked, so it stops believing before anyone else may start. Who loses must exit at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, NamedTuple

from prefixpool.errors import PrefixpoolError
from prefixpool_operator.kube import LEASE, KubeApi, KubeError, NotFoundError
from prefixpool_operator.observed import Raw

_log = logging.getLogger(__name__)

_JITTER: Final = 0.2  # of a pause, so that candidates do not knock together


class LeadershipLostError(PrefixpoolError):
    """Somebody else may be leading by now: write nothing more, exit."""


class LeaseTerms(NamedTuple):
    """Seconds. `renew_s` < `duration_s`: the leader gives up that much before others may take over."""

    duration_s: float = 15.0
    renew_s: float = 10.0
    retry_s: float = 2.0


class Elector:
    """`acquire`, then `hold` for as long as the process works, then `release`. One task uses it."""

    def __init__(
        self,
        api: KubeApi,
        *,
        namespace: str,
        name: str,
        identity: str,
        terms: LeaseTerms,
        clock: Callable[[], float],
        now: Callable[[], datetime],
        draw: Callable[[], float],
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._terms = terms
        self._clock = clock
        self._now = now
        self._draw = draw
        self._seen: Raw | None = None  # the Lease's spec as last seen, and since when it is so
        self._seen_at = 0.0
        self._renewed_at: float | None = None
        self.problem = ""  # why the last try got no answer about the Lease

    def leads(self) -> bool:
        """Whether this process may write. False already before others may."""
        return self._renewed_at is not None and self._clock() < self._renewed_at + self._terms.renew_s

    async def acquire(self) -> None:
        """Returns when this process leads; waits as long as another one does."""
        while not await self._attempt():  # noqa: ASYNC110 -- nobody announces a free lease
            await asyncio.sleep(self._terms.retry_s * (1 + _JITTER * self._draw()))
        _log.info("leading", extra={"lease": f"{self._namespace}/{self._name}", "identity": self._identity})

    async def hold(self) -> None:
        """Renews until it cannot. Raises LeadershipLostError; never returns."""
        while True:
            await asyncio.sleep(self._terms.retry_s)
            if not await self._attempt() and self._renewed_at is None:
                raise LeadershipLostError(f"the lease {self._namespace}/{self._name} has another holder")
            if not self.leads():
                raise LeadershipLostError(
                    f"the lease {self._namespace}/{self._name} could not be renewed for {self._terms.renew_s:g} s"
                )

    async def release(self) -> None:
        """Let the next one lead at once. Only after the last write of this process."""
        if self.leads():
            self._renewed_at = None
            try:
                await self._write(await self._read(), holder="")
            except (KubeError, TimeoutError) as error:
                _log.warning("the lease was not released; it ends by itself", extra={"error": str(error)})

    async def _attempt(self) -> bool:
        """One try to become or stay leader. False: not now; `_renewed_at` is None if another one leads."""
        asked_at = self._clock()
        try:
            async with asyncio.timeout(self._patience_s(asked_at)):
                lease = await self._read()
                self.problem = ""
                if not self._mine_to_take(lease):
                    self._renewed_at = None
                    return False
                await self._write(lease, holder=self._identity)
        except (KubeError, TimeoutError) as error:
            said = str(error) or "no answer in time"
            self.problem = f"the lease could not be taken or renewed: {said}"
            _log.warning("the lease could not be taken or renewed", extra={"error": said})
            return False
        self._renewed_at = asked_at
        return True

    def _patience_s(self, asked_at: float) -> float:
        """A leader's try may last until its time is over, not longer."""
        held_since = asked_at if self._renewed_at is None else self._renewed_at
        return max(0.0, held_since + self._terms.renew_s - asked_at)

    async def _read(self) -> Raw | None:
        try:
            lease = await self._api.get(LEASE, self._namespace, self._name)
        except NotFoundError:
            return None
        if lease.get("spec") != self._seen:
            self._seen, self._seen_at = lease.get("spec"), self._clock()
        return lease

    def _mine_to_take(self, lease: Raw | None) -> bool:
        spec = (lease or {}).get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        duration_s = float(spec.get("leaseDurationSeconds") or self._terms.duration_s)
        return holder in ("", self._identity) or self._clock() >= self._seen_at + duration_s

    async def _write(self, lease: Raw | None, *, holder: str) -> None:
        body = self._lease(lease, holder)
        if lease is None:
            await self._api.create(LEASE, body)
        else:
            await self._api.patch(LEASE, self._namespace, self._name, body)

    def _lease(self, lease: Raw | None, holder: str) -> Raw:
        """With the resource version that was read: who comes second gets a conflict."""
        old = (lease or {}).get("spec") or {}
        changes_hands = old.get("holderIdentity") != holder
        stamp = self._now().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        version = {"resourceVersion": lease["metadata"]["resourceVersion"]} if lease else {}
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": {"name": self._name, "namespace": self._namespace, **version},
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": max(1, round(self._terms.duration_s)),
                "acquireTime": stamp if changes_hands else old.get("acquireTime", stamp),
                "renewTime": stamp,
                "leaseTransitions": int(old.get("leaseTransitions") or 0) + (changes_hands and lease is not None),
            },
        }
