"""Promises to keep a prefix, and who may make how many. Pure."""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush
from typing import Final

import msgspec

TENANT_SHARE: Final = 0.25  # of the pool, for the reservations of one tenant
POOL_SHARE: Final = 0.5  # for those of all


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What a router asks in a request's `kv_transfer_params`; other fields there are others'."""

    pin_until: float  # seconds since 1970
    tenant: str = ""
    pin_tokens: int = 1 << 62  # of the prompt's first tokens


class Reservations:
    """Which chunks are promised to whom. A chunk counts for the tenant that reserved it first, until that time is over."""

    def __init__(self, capacity: int) -> None:
        self._of_tenant = int(TENANT_SHARE * capacity)
        self._of_all = int(POOL_SHARE * capacity)
        self._until: dict[bytes, tuple[float, str]] = {}
        self._ends: list[tuple[float, bytes]] = []
        self._spent: Counter[str] = Counter()

    def take(self, key: bytes, wish: Wish, now_s: float) -> bool:
        """False: the quota is spent."""
        self._expire(now_s)
        until, tenant = self._until.get(key, (0.0, wish.tenant))
        if not until:
            if self._spent[wish.tenant] >= self._of_tenant or len(self._until) >= self._of_all:
                return False
            self._spent[wish.tenant] += 1
        if wish.pin_until > until:
            self._until[key] = (wish.pin_until, tenant)
            heappush(self._ends, (wish.pin_until, key))
        return True

    def lose(self, key: bytes, now_s: float) -> bool:
        """The chunk is gone. True: before its time, so that a promise is broken."""
        self._expire(now_s)
        if (promise := self._until.pop(key, None)) is None:
            return False
        self._spent[promise[1]] -= 1
        return True

    def lose_all(self, now_s: float) -> int:
        """All chunks are gone. How many promises are broken."""
        self._expire(now_s)
        broken = len(self._until)
        self._until.clear()
        self._ends.clear()
        self._spent.clear()
        return broken

    def _expire(self, now_s: float) -> None:
        while self._ends and self._ends[0][0] <= now_s:
            end, key = heappop(self._ends)
            until, tenant = self._until.get(key, (0.0, ""))
            if until == end:
                del self._until[key]
                self._spent[tenant] -= 1
