"""`worth` as vLLM's cache policy for the host tier (vLLM 0.32). Runs in the scheduler: O(log n), no I/O.

A request may reserve its prefix: `kv_transfer_params` {"tenant": name, "pin_until": seconds since 1970, "pin_tokens": so
many of its first tokens}. Routers set it, clients cannot. All of a tenant's reservations together take at most a share of
the pool, so that promises to one are not paid by all.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus, order_request_keys

from prefixpool_agent.tiers.reservations import Reservations, Wish
from prefixpool_agent.tiers.tally import Tally
from prefixpool_agent.tiers.trail import Place, Trail
from prefixpool_agent.tiers.worth import Ranking, recompute

REMEMBERED: Final = 2  # evicted chunks, as a multiple of the pool


class WorthPolicy(CachePolicy):  # type: ignore[misc]
    """See `vllm.v1.kv_offload.cpu.policies.base.CachePolicy`."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._ranking = Ranking(REMEMBERED * cache_capacity, recompute)
        self._reservations = Reservations(cache_capacity)
        self.counts = Tally()  # names of the host tier's metric
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        self._places: dict[bytes, Place] = {}  # of chunks that are about to be inserted

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        """A resident chunk."""
        return self._chunks.get(key)

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """These will be inserted, if there is room."""
        trail: Trail | None = req_context.get_state(Trail)
        if trail is None:
            req_context.set_state(trail := Trail())
        self._places = trail.places(keys, req_context._offload_key_positions)

    def insert(self, key: OffloadKey, chunk: ChunkStatus) -> None:
        """It is busy until it is written."""
        parent, tokens = self._places.pop(key, Place())
        self._chunks[key] = chunk
        self._ranking.add(key, parent, tokens, time.monotonic(), busy=chunk.ref_cnt != 0)
        self.counts.add("written")

    def remove(self, key: OffloadKey) -> None:
        """Its store failed."""
        del self._chunks[key]
        self._ranking.remove(key)
        self.counts.add("write_failed")
        self.counts.add("reservation_broken", self._reservations.lose(key, time.time()))

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """vLLM tells uses by request, see below."""

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """What it reused counts as used, and what it may promise is kept."""
        now_s = time.monotonic()
        keys = order_request_keys(key_groups, req_context)
        for key in reversed(keys):
            if key in reused_keys:
                self._ranking.use(key, now_s)
        if (wish := _wish(req_context.kv_transfer_params)) is not None:
            self._reserve(keys, wish, req_context)

    def _reserve(self, keys: Iterable[OffloadKey], wish: Wish, req_context: ReqContext) -> None:
        for key in keys:
            if (req_context.get_offload_key_position(key) or 0) > wish.pin_tokens or key not in self._chunks:
                continue
            if not self._reservations.take(key, wish, time.time()):
                self.counts.add("reservation_refused")
                return
            self.counts.add("reservation_made")
            self._ranking.reserve(key, time.monotonic() + wish.pin_until - time.time())

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """None: nothing that may go is left, and the newcomers are not stored."""
        keys = self._ranking.pop(n, time.monotonic(), protected)
        if keys is None:
            return None
        self.counts.add("evicted_capacity", n)
        return [(OffloadKey(key), self._chunks.pop(OffloadKey(key))) for key in keys]

    def clear(self) -> None:
        """All chunks are gone, and all promises with them."""
        self._chunks.clear()
        self._places.clear()
        self._ranking.clear()
        self.counts.add("reservation_broken", self._reservations.lose_all(time.time()))

    def mark_evictable(self, key: OffloadKey) -> None:
        """Written, or read to the end."""
        self._ranking.set_busy(key, False)

    def mark_non_evictable(self, key: OffloadKey) -> None:
        """Being read, for the device or for the disk."""
        self._ranking.set_busy(key, True)
        self.counts.add("read")


def _wish(params: dict[str, Any] | None) -> Wish | None:
    if not params or "pin_until" not in params:
        return None
    try:
        return msgspec.convert(params, Wish)
    except msgspec.ValidationError:
        return None  # a router of another version
