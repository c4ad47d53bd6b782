"""Every metric of the router, declared once. Labels are bounded: replicas are members of the pool, the rest are enums."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

# A decision is tens to hundreds of microseconds (research: prefix_index.md).
_DECISION_S: Final = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.02, 0.1)
_TOKENS: Final = (0, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536)
# From a cached short answer to a long one.
_ANSWER_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


_Metric = TypeVar("_Metric", Counter, Gauge, Histogram)


class Labelled(Generic[_Metric]):
    """A metric with labels. Looking up one of its series costs more than counting in it, so each is looked up once."""

    def __init__(self, metric: _Metric) -> None:
        self._metric: _Metric = metric
        self.labels: Callable[..., _Metric] = functools.cache(metric.labels)

    def forget(self, replica: str) -> None:
        """Remove the series of one replica."""
        self._metric.remove_by_labels({"replica": replica})
        self.labels = functools.cache(self._metric.labels)


class RoutingMetrics:
    """What routing counts; the edge's are in the same registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._by_replica: list[Labelled[Counter] | Labelled[Gauge] | Labelled[Histogram]] = []
        self._registry = registry

        # Decisions
        self.decisions = self._counters("decisions", "Requests sent to a replica, by why it was chosen", "replica", "reason")
        self.refusals = self._counters("refusals", "Requests for which no replica was left, by cause", "cause")
        self.abandoned = self._counters("abandoned", "Attempts given up before anything reached a client", "replica", "why")
        self.decision_seconds = Histogram(
            "prefixpool_router_decision_seconds", "Parsed request to chosen replica", buckets=_DECISION_S, registry=registry
        )
        self.refused_loads = self._counters(
            "refused_loads",
            "Requests whose engine was told to compute what a tier holds, because loading it takes longer",
            "replica",
            "tier",
        )

        # Closed loop
        self.prompt_tokens = self._counters("prompt_tokens", "Prompt tokens of answers, as engines counted them", "replica")
        self.predicted_tokens = self._counters(
            "predicted_cached_tokens", "Cached tokens expected of the same, by the tier they were in", "replica", "tier"
        )
        self.cached_tokens = self._counters("cached_tokens", "Cached tokens that engines reported for the same", "replica")
        self.prediction_error = Labelled(
            Histogram(
                "prefixpool_router_prediction_error_tokens",
                "Difference between predicted and actual cached tokens of one answer",
                ("replica", "direction"),
                buckets=_TOKENS,
                registry=registry,
            )
        )
        self._by_replica.append(self.prediction_error)
        self.trust = self._gauges("replica_trust_ratio", "How far predictions for a replica are believed, 0 to 1", "replica")

        # Knowledge of the fleet
        self.replicas = self._gauges("replicas", "Members of the pool, by whether requests are sent to them", "usable")
        self.mode = self._gauges("replica_mode", "1 for the mode in which a replica's cache is known", "replica", "mode")
        self.usable = self._gauges("replica_usable", "1 if requests are sent to the replica", "replica")
        self.inflight = self._gauges("replica_inflight_requests", "Requests in a replica, of all routers", "replica")
        self.own_inflight = self._gauges("replica_own_inflight_requests", "Requests of this router in a replica", "replica")
        self.mode_changes = self._counters(
            "replica_mode_changes", "Changes of a replica's mode, by the new one", "replica", "mode"
        )
        self.stream_losses = self._counters("agent_stream_losses", "Agent streams that broke or fell silent", "replica")
        self.snapshots = self._counters("agent_snapshots", "Pictures of a replica's cache begun from scratch", "replica")

        self.members_problem = self._gauge("members_problem", "1 while members cannot be looked up (the last stay in use)")

        # Memory
        self.boundaries = self._gauge("index_boundaries", "Boundaries in the prefix index")
        self.evictions = self._counter("index_evictions", "Boundaries dropped because the index was full")
        self.loop_lag = self._gauge("loop_lag_seconds", "How late the event loop ran its last quarter-second tick")

    def forget(self, replica: str) -> None:
        """Remove the series of a replica that left the pool."""
        for metric in self._by_replica:
            metric.forget(replica)

    def _counter(self, what: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"prefixpool_router_{what}", help_text, labels, registry=self._registry)

    def _gauge(self, what: str, help_text: str, *labels: str) -> Gauge:
        return Gauge(f"prefixpool_router_{what}", help_text, labels, registry=self._registry)

    def _counters(self, what: str, help_text: str, *labels: str) -> Labelled[Counter]:
        metric = Labelled(self._counter(what, help_text, *labels))
        if "replica" in labels:
            self._by_replica.append(metric)
        return metric

    def _gauges(self, what: str, help_text: str, *labels: str) -> Labelled[Gauge]:
        metric = Labelled(self._gauge(what, help_text, *labels))
        if "replica" in labels:
            self._by_replica.append(metric)
        return metric


class EdgeMetrics:
    """What the HTTP edge counts. `api` is one of paths.Api."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(what: str, help_text: str, *labels: str) -> Labelled[Counter]:
            return Labelled(Counter(f"prefixpool_router_{what}", help_text, labels, registry=registry))

        def seconds(what: str, help_text: str, *labels: str) -> Labelled[Histogram]:
            name = f"prefixpool_router_{what}_seconds"
            return Labelled(Histogram(name, help_text, labels, buckets=_ANSWER_S, registry=registry))

        self.requests = counter(
            "requests", "Requests of clients, by API and HTTP status (499: the client went away)", "api", "status"
        )
        self.rejected = counter("rejected_requests", "Requests that no replica saw, by HTTP status", "status")
        self.retries = counter("retries", "Attempts repeated on another replica, by what became of the first", "why")
        self.broken_streams = counter("broken_streams", "Streams that an engine did not complete", "why")
        self.first_byte_seconds = seconds("first_byte", "Request read to first byte of its streamed answer", "api")
        self.answer_seconds = seconds("answer", "Request read to the end of its answer", "api")
        self.open_requests = Gauge("prefixpool_router_open_requests", "Requests being served", registry=registry)
        self.body_bytes = Gauge("prefixpool_router_body_bytes", "Bytes of request bodies in memory", registry=registry)
        self.waiting_requests = Gauge(
            "prefixpool_router_waiting_requests", "Requests that wait for a place", registry=registry
        )


class WorkersMetrics:
    """What the parent of several workers counts. Owns its registry: the workers have theirs."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.restarts = Counter(
            "prefixpool_router_worker_restarts", "Workers started again after they died", ("worker",), registry=self.registry
        )
        self.answering = Gauge(
            "prefixpool_router_workers_answering", "Workers that answered this scrape", registry=self.registry
        )
