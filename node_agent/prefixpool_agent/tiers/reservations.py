"""Promises to keep a prefix, and who may make how many. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Final

import msgspec

from prefixpool_agent.tiers.deadlines import Deadlines

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
        self._tenants: dict[bytes, str] = {}
        self._ends = Deadlines()
        self._spent: Counter[str] = Counter()

    @property
    def entries(self) -> int:
        """All that is kept: bounded by a multiple of what is promised."""
        return self._ends.entries

    def take(self, key: bytes, wish: Wish, now_s: float) -> bool:
        """False: the quota is spent."""
        self._expire(now_s)
        if key not in self._tenants:
            if self._spent[wish.tenant] >= self._of_tenant or len(self._tenants) >= self._of_all:
                return False
            self._tenants[key] = wish.tenant
            self._spent[wish.tenant] += 1
        self._ends.prolong(key, wish.pin_until)
        return True

    def lose(self, key: bytes, now_s: float) -> bool:
        """The chunk is gone. True: before its time, so that a promise is broken."""
        self._expire(now_s)
        if not self._ends.drop(key):
            return False
        self._end(key)
        return True

    def lose_all(self, now_s: float) -> int:
        """All chunks are gone. How many promises are broken."""
        self._expire(now_s)
        broken = len(self._tenants)
        self._tenants.clear()
        self._ends.clear()
        self._spent.clear()
        return broken

    def _expire(self, now_s: float) -> None:
        for key in self._ends.over(now_s):
            self._end(key)

    def _end(self, key: bytes) -> None:
        tenant = self._tenants.pop(key)
        self._spent[tenant] -= 1
        if not self._spent[tenant]:
            del self._spent[tenant]
