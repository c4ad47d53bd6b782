"""Metrics of the tiers: what the engine counts, by tier and by reason, across its restarts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from prefixpool_agent.engines.metrics import EngineLoad, TierFigures
from prefixpool_agent.tier_metrics import Kind, TierMetrics, meaning
from prefixpool_agent.tiers.disk_ledger import Failure, Removal

Value = Callable[..., float | None]


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> TierMetrics:
    return TierMetrics(registry)


@pytest.fixture
def value(registry: CollectorRegistry) -> Value:
    return lambda name, **labels: registry.get_sample_value(f"prefixpool_agent_{name}", labels)


def disk(**events: int) -> EngineLoad:
    return EngineLoad(disk=TierFigures(used_bytes=30, capacity_bytes=120, events=tuple(events.items())))


@pytest.mark.parametrize(
    ("event", "kind", "detail"),
    [
        ("written", Kind.STORE, ""),
        ("read", Kind.LOAD, ""),
        ("left_over", Kind.EVICTION, "left_over"),
        ("reservation_broken", Kind.RESERVATION, "broken"),
        ("write_skipped", Kind.FAILURE, "write_skipped"),
        *[(f"evicted_{why}", Kind.EVICTION, str(why)) for why in Removal],
        *[(f"read_{why}", Kind.FAILURE, f"read_{why}") for why in Failure],
        *[(f"write_{why}", Kind.FAILURE, f"write_{why}") for why in Failure],
    ],
)
def test_every_name_that_a_tier_gives_has_its_meaning(event: str, kind: Kind, detail: str) -> None:
    assert meaning(event) == (kind, detail)


def test_fill_and_events_are_told_by_tier_and_reason(metrics: TierMetrics, value: Value) -> None:
    metrics.read(disk(written=5, read=2, evicted_capacity=3, evicted_damaged=1, read_corrupt=1))
    metrics.device_holds(3, 4)
    assert (value("tier_fill_ratio", tier="disk"), value("tier_fill_ratio", tier="device")) == (0.25, 0.75)
    assert (value("tier_used_bytes", tier="disk"), value("tier_capacity_bytes", tier="disk")) == (30, 120)
    assert (value("tier_stores_total", tier="disk"), value("tier_loads_total", tier="disk")) == (5, 2)
    assert value("tier_evictions_total", tier="disk", reason="capacity") == 3
    assert value("tier_evictions_total", tier="disk", reason="damaged") == 1
    assert value("tier_failures_total", tier="disk", reason="read_corrupt") == 1


def test_tier_that_is_not_there_is_not_told(metrics: TierMetrics, value: Value) -> None:
    metrics.read(disk())
    assert value("tier_fill_ratio", tier="host") is None
    assert value("tier_used_bytes", tier="host") is None


def test_totals_grow_on_when_the_engine_counts_from_nothing_again(metrics: TierMetrics, value: Value) -> None:
    for written in (5, 7, 1, 1, 4):
        metrics.read(disk(written=written))
    assert value("tier_stores_total", tier="disk") == 7 + 4


def test_cached_tokens_are_of_the_tier_they_came_from(metrics: TierMetrics, value: Value) -> None:
    metrics.read(EngineLoad(cached_tokens=100, host_tokens=30, disk_tokens=20))
    metrics.read(EngineLoad(cached_tokens=110, host_tokens=30, disk_tokens=25))
    found = {tier: value("tier_cached_tokens_total", tier=tier) for tier in ("device", "host", "disk")}
    assert found == {"device": 55, "host": 30, "disk": 25}


def test_tokens_from_below_that_were_told_first_counted_all_of_the_device_again(metrics: TierMetrics, value: Value) -> None:
    metrics.read(EngineLoad(cached_tokens=1000))
    metrics.read(EngineLoad(cached_tokens=1000, host_tokens=64))
    assert value("tier_cached_tokens_total", tier="device") == 1000


def test_broken_reservations_are_told(metrics: TierMetrics, value: Value) -> None:
    events = (("reservation_broken", 2), ("reservation_made", 9))
    metrics.read(EngineLoad(host=TierFigures(events=events)))
    assert (value("tier_reservations_total", outcome="broken"), value("tier_reservations_total", outcome="made")) == (2, 9)
