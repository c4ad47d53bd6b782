"""Metrics of the tiers, from what the engine counts: fill, hits, what came and went, and why."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge

from prefixpool_agent.engines.metrics import EngineLoad, TierFigures

DEVICE: Final = "device"
_LEFT_OVER: Final = "left_over"  # files of a writer that died


class Kind(StrEnum):
    """What an event of a tier is about."""

    STORE = "store"
    LOAD = "load"
    EVICTION = "eviction"
    RESERVATION = "reservation"
    FAILURE = "failure"


class Meaning(NamedTuple):
    """`detail`: the reason or outcome; empty where there is none to tell."""

    kind: Kind
    detail: str = ""


def meaning(event: str) -> Meaning:
    """Of the name that a tier gives to something that happened to a chunk. What has no other meaning is a failure. Pure."""
    word, _, detail = event.partition("_")
    if event in ("written", "read"):
        return Meaning(Kind.STORE if event == "written" else Kind.LOAD)
    if word == "evicted" or event == _LEFT_OVER:
        return Meaning(Kind.EVICTION, detail if word == "evicted" else event)
    return Meaning(Kind.RESERVATION, detail) if word == "reservation" else Meaning(Kind.FAILURE, event)


class TierMetrics:
    """Totals of the engine's, passed on; they go on growing when it is started again."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"prefixpool_agent_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"prefixpool_agent_{name}", text, ("tier",), registry=registry)

        self._fill = gauge("tier_fill_ratio", "Share of a tier that holds blocks")
        self._used = gauge("tier_used_bytes", "Bytes of blocks in a tier below the device")
        self._capacity = gauge("tier_capacity_bytes", "Bytes that a tier below the device may use")
        self._tokens = counter("tier_cached_tokens", "Prompt tokens found cached, by the tier they came from", "tier")
        self._stores = counter("tier_stores", "Chunks written to a tier below the device", "tier")
        self._loads = counter(
            "tier_loads", "Chunks read from a tier below the device, for the one above or below it", "tier"
        )
        self._evictions = counter("tier_evictions", "Chunks removed from a tier below the device", "tier", "reason")
        self._failures = counter("tier_failures", "What went wrong in a tier below the device", "tier", "reason")
        self._reservations = counter("tier_reservations", "Chunks that requests wanted kept in host memory", "outcome")
        self._seen: dict[tuple[str, str], int] = {}

    def device_holds(self, blocks: int, of_blocks: int) -> None:
        """Blocks of the device tier that hold something, and all of them."""
        self._fill.labels(DEVICE).set(blocks / of_blocks if of_blocks else 0.0)

    def read(self, load: EngineLoad) -> None:
        """One reading of the engine's figures."""
        cached = self._new("", "tokens", load.cached_tokens)
        below = {"host": load.host_tokens, "disk": load.disk_tokens}
        new = {tier: self._new(tier, "tokens", tokens) for tier, tokens in below.items()}
        # Not from the difference of the totals: where one is told before the other it shrinks, like that of a new engine.
        new[DEVICE] = max(0, cached - sum(new.values()))
        for tier, tokens in new.items():
            self._tokens.labels(tier).inc(tokens)
        self._below("host", load.host)
        self._below("disk", load.disk)

    def _below(self, tier: str, figures: TierFigures) -> None:
        if figures.capacity_bytes:
            self._fill.labels(tier).set(figures.used_bytes / figures.capacity_bytes)
            self._used.labels(tier).set(figures.used_bytes)
            self._capacity.labels(tier).set(figures.capacity_bytes)
        for event, total in figures.events:
            self._counter(tier, meaning(event)).inc(self._new(tier, event, total))

    def _counter(self, tier: str, of: Meaning) -> Counter:
        match of.kind:
            case Kind.STORE:
                return self._stores.labels(tier)
            case Kind.LOAD:
                return self._loads.labels(tier)
            case Kind.RESERVATION:
                return self._reservations.labels(of.detail)
            case Kind.EVICTION:
                return self._evictions.labels(tier, of.detail)
            case Kind.FAILURE:
                return self._failures.labels(tier, of.detail)

    def _new(self, tier: str, what: str, total: int) -> int:
        """Since the last reading; an engine that was started again counts from 0."""
        seen = self._seen.get((tier, what), 0)
        self._seen[tier, what] = total
        return max(0, total - seen if total >= seen else total)
