"""Every metric of the agent. Labels are bounded: reasons and phases come from fixed sets, never from requests."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from prefixpool.wire import Costs, DiskCause, DiskProblem, DrainPhase, Memory, Mode, State, Tier
from prefixpool_agent.residency import Residency
from prefixpool_agent.tier_metrics import TierMetrics

PREDICTION_TOKENS: Final = (0, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384)
SNAPSHOT_REASONS: Final = (
    "connected",
    "engine restarted",
    "engine ended",
    "events lost",
    "router too slow",
    "a bug of the agent",
)


class AgentMetrics:
    """One per process, on the registry that `/metrics` shows."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"prefixpool_agent_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"prefixpool_agent_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"prefixpool_agent_{name}", text, buckets=buckets, registry=registry)

        # Residency
        self.boundaries = gauge("boundaries", "Boundaries that the agent knows, resident or not")
        self.blocks = gauge("blocks", "Blocks that the agent knows, resident or leading to one that is")
        self.tier_blocks = gauge("tier_blocks", "Blocks that a request could reuse, by the tier that serves them", "tier")
        self.tiers = TierMetrics(registry)
        self.sessions = gauge("open_requests", "Requests whose boundaries are not placed for good")
        self.ignored = counter("residency_ignored", "Events, notes and boundaries that were ignored or dropped", "reason")
        self.flush_seconds = histogram(
            "flush_seconds",
            "Time of one residency flush, during which nothing else runs",
            (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1),
        )
        self.flushes_broken = counter("flushes_broken", "Flushes that a bug of the agent ended, and a new picture began")
        self.save_seconds = histogram(
            "save_seconds", "Time of one save of the residency map", (0.003, 0.01, 0.03, 0.1, 0.3, 1)
        )
        # KV events
        self.event_batches = counter("event_batches", "Batches of KV events applied")
        self.events = counter("events", "KV events applied")
        self.events_lost = counter("event_losses", "Times that the event stream had a hole and the picture was dropped")
        self.replays = counter("event_replays", "Replays of KV events that were asked for")
        self.replayed = counter("event_batches_replayed", "Batches of KV events that came by replay")
        # Notes
        self.notes = counter("notes", "Notes from the gates", "kind")
        self.notes_lost = counter("notes_lost", "Notes that fell out of a gate's ring before anyone read them")
        self.notes_bad = counter("notes_bad", "Notes that could not be read")
        self.gates = gauge("gates_connected", "API server processes of the engine that are connected")
        # Closed loop
        self.prediction_error = histogram(
            "prediction_error_tokens", "Predicted and actual cached tokens: how far apart, either way", PREDICTION_TOKENS
        )
        self.predictions = counter("predictions", "Predictions compared with what the engine reported", "outcome")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens that the engine found cached")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests")
        self.report_full = counter("full_reports_asked", "Requests for which a full report of reused blocks was asked")
        # Routers
        self.routers_connected = gauge("routers_connected", "Routers with an open stream")
        self.queue_overflows = counter("queue_overflows", "Times that a router read too slowly and got a new snapshot")
        self.streams_broken = counter(
            "streams_broken", "Streams to routers that a bug of the agent ended; they connect again"
        )
        self.snapshots = counter("snapshots", "Snapshots sent to routers", "reason")
        # Engine
        self.state = gauge("state", "1 for the present state of the engine", "state")
        self.disk_problem = gauge("disk_problem", "1 for what is wrong with the disk tier", "cause")
        self.mode = gauge("mode", "1 for how much routers may know of this cache", "mode")
        self.engine_restarts = gauge("engine_restarts", "Engine restarts since the supervisor started")
        self.epochs = counter("epochs", "Engine starts that this agent has seen")
        self.inflight = gauge("inflight_requests", "Requests inside the gate")
        self.scrapes = counter("engine_scrapes", "Reads of the engine's metrics", "outcome")
        self.scrape_seconds = histogram("engine_scrape_seconds", "Time of one read", (0.01, 0.03, 0.1, 0.3, 1, 3))
        self.drain_phase = gauge("drain_phase", "1 for the present phase of a drain", "phase")
        self.prefill_seconds = gauge("prefill_token_seconds", "Measured seconds per uncached token of prefill")
        self.decode_seconds = gauge("decode_step_seconds", "Measured seconds of one decode step")
        self.load_seconds = gauge("load_token_seconds", "Measured seconds to bring a token back from a tier", "tier")
        self.memory_used = gauge("memory_used_bytes", "Memory of the container that cannot be given back: without files")
        self.memory_limit = gauge("memory_limit_bytes", "Memory that the container may use; 0: no limit")
        self._ignored: dict[str, int] = {}
        _one_of(self.state, State, State.STARTING)
        _one_of(self.mode, Mode, Mode.NONE)
        _one_of(self.drain_phase, DrainPhase, DrainPhase.NONE)
        _one_of(self.disk_problem, DiskCause, None)

    def in_state(self, state: State, mode: Mode, disk: DiskProblem | None) -> None:
        """The engine's state, the mode, and what is wrong with the disk tier."""
        _one_of(self.state, State, state)
        _one_of(self.mode, Mode, mode)
        _one_of(self.disk_problem, DiskCause, disk.cause if disk is not None else None)

    def memory(self, seen: Memory) -> None:
        """Of the container."""
        self.memory_used.set(seen.used_bytes)
        self.memory_limit.set(seen.limit_bytes)

    def in_drain(self, phase: DrainPhase) -> None:
        """The drain's phase."""
        _one_of(self.drain_phase, DrainPhase, phase)

    def costs(self, costs: Costs) -> None:
        """As the agent measured them."""
        self.prefill_seconds.set(costs.prefill_s_per_token)
        self.decode_seconds.set(costs.decode_step_s)
        self.load_seconds.labels("host").set(costs.host_s_per_token)
        self.load_seconds.labels("disk").set(costs.disk_s_per_token)

    def resident(self, residency: Residency, device_blocks: int) -> None:
        """What the agent knows. `device_blocks`: all that the device has; 0: no engine."""
        self.boundaries.set(residency.boundaries)
        self.blocks.set(residency.blocks)
        resident = residency.resident_blocks()
        for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK):
            self.tier_blocks.labels(tier.name.lower()).set(resident[tier])
        self.tiers.device_holds(residency.device_blocks, device_blocks)
        self.sessions.set(residency.sessions)
        self._ignored_by_reason(residency.counts)

    def _ignored_by_reason(self, counts: Mapping[str, int]) -> None:
        """Running totals by reason, which are words in the residency's code."""
        for reason, total in counts.items():
            self.ignored.labels(reason).inc(total - self._ignored.get(reason, 0))
        self._ignored = dict(counts)

    def predicted(self, predicted: int, actual: int, block_tokens: int) -> None:
        """One comparison: `within` one block, `under` or `over` by more."""
        error = predicted - actual
        self.prediction_error.observe(abs(error))
        outcome = "within" if abs(error) <= block_tokens else "over" if error > 0 else "under"
        self.predictions.labels(outcome).inc()

    # -- publisher ---------------------------------------------------------------------------------------------------

    def routers(self, connected: int) -> None:
        """Connections now."""
        self.routers_connected.set(connected)

    def overflowed(self) -> None:
        """A router's queue was dropped."""
        self.queue_overflows.inc()

    def snapshot_taken(self, reason: str) -> None:
        """One router gets a new picture."""
        self.snapshots.labels(reason if reason in SNAPSHOT_REASONS else "other").inc()

    def stream_broken(self) -> None:
        """A bug ended one router's stream."""
        self.streams_broken.inc()


def _one_of(gauge: Gauge, kinds: type[StrEnum], now: StrEnum | None) -> None:
    for kind in kinds:
        gauge.labels(kind.value).set(kind == now)
