"""Every metric of the operator, declared once. No label names a pool: their number is not bounded."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_RECONCILE_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Result(StrEnum):
    """Of one reconcile."""

    DONE = "done"
    GONE = "gone"  # the pool does not exist any more
    FAILED = "failed"  # tried again with backoff


class OperatorMetrics:
    """Values that are asked for at scrape time are set by who knows them (`set_function`)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(what: str, help_text: str) -> Gauge:
            return Gauge(f"prefixpool_operator_{what}", help_text, registry=registry)

        def counter(what: str, help_text: str, *labels: str) -> Counter:
            return Counter(f"prefixpool_operator_{what}", help_text, labels, registry=registry)

        self.reconciles = counter("reconciles", "Looks at one pool, by how they ended", "result")
        self.reconcile_seconds = Histogram(
            "prefixpool_operator_reconcile_seconds", "One look at one pool", buckets=_RECONCILE_S, registry=registry
        )
        self.actions = counter("actions", "Writes to the API server, by action and kind of the object", "action", "kind")
        self.action_failures = counter("action_failures", "The same, refused or unanswered", "action", "kind")
        self.watch_restarts = counter("watch_restarts", "Times that watching ended by itself and was started again")
        self.pools = gauge("pools", "InferencePools that this process looks after")
        self.queue_depth = gauge("queue_depth", "Pools that wait for a look")
        self.passed_over = gauge("namespaces_passed_over", "Namespaces to look after that may not be read")
        self.leader = gauge("leader", "1 while this process leads")
