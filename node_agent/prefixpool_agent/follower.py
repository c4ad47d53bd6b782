"""Follows the engine: KV events and notes go in, changes for the routers, costs and the backlog come out.

Owns the residency picture of one engine start at a time. Everything runs in the event loop in small steps; changes are
collected for a few milliseconds before they are mapped and published.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from prefixpool import note as notes
from prefixpool.wire import Costs, Tier
from prefixpool_agent.costs import CostModel, Served, Timeline
from prefixpool_agent.defect import log_defect
from prefixpool_agent.kv_order import Batch
from prefixpool_agent.load import Backlog
from prefixpool_agent.metrics import AgentMetrics
from prefixpool_agent.progress import Progress
from prefixpool_agent.publisher import Publisher
from prefixpool_agent.residency import Finished, Residency
from prefixpool_agent.residency.answer import Answer, parse_answer

FLUSH_DELAY_S: Final = 0.005
HEAL_REQUESTS: Final = 32  # a full report costs the agent under a millisecond (research: residency.md)
MAX_RUNNING: Final = 4096

log = logging.getLogger(__name__)


class Follower:
    """A `KvSink` and a `NoteSink`. `command` sends to the gates, `nudge` says that the load may have changed."""

    def __init__(
        self,
        *,
        publisher: Publisher,
        metrics: AgentMetrics,
        command: Callable[[notes.ToGate], int],
        nudge: Callable[[], None],
        greeted: Callable[[notes.GateHello], None],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._publisher = publisher
        self._metrics = metrics
        self._command = command
        self._nudge = nudge
        self._greeted = greeted
        self._clock = clock
        self._wall = wall
        self._residency: Residency | None = None
        self._live_since_s = float("inf")
        self._dirty = asyncio.Event()
        self._costs = CostModel()
        self._timeline = Timeline(self._prefill_s)
        self._running: OrderedDict[str, Progress] = OrderedDict()
        self.block_tokens = 0
        self.backlog = Backlog()
        self.changed_since_save = False
        self.last_event_s = 0.0  # of the engine's clock, seconds since 1970
        self._heard_s = float("-inf")  # when the last batch came
        self.uncached_since_s = float("inf")  # see engine_state.EventEvidence
        self.store = ""  # the shared directory that the engine's chunks are in; "": none

    # -- life of an engine start -------------------------------------------------------------------------------------

    def begin(self, residency: Residency | None, block_tokens: int, costs: Costs | None) -> None:
        """Another engine start, or this agent's own. `costs`: what an agent before this one had measured."""
        self._residency = residency
        if residency is not None:
            residency.share_disk(bool(self.store))
        self.block_tokens = block_tokens
        self._live_since_s = float("inf")
        self.last_event_s = 0.0
        self._heard_s = float("-inf")
        self.uncached_since_s = float("inf")
        if costs is not None:
            self._costs = CostModel(costs)
        self._dirty.set()

    def caught_up(self) -> None:
        """Replay is over: from here on, predictions are what routers could know."""
        self._live_since_s = self._clock()
        self.flush()
        self._publisher.release()

    def forget(self, reason: str) -> None:
        """The engine is gone: nothing is cached any more. Costs stay; the next engine is of the same kind."""
        if self._residency is not None:
            self._residency.reset()
        self._live_since_s = float("inf")
        self._timeline.forget()
        self._running.clear()
        self.backlog.forget()
        self.changed_since_save = False
        self._publisher.restart(reason)
        self._publisher.release()  # an empty picture is whole

    @property
    def following(self) -> bool:
        """An engine is there, and what it has told so far is known."""
        return self._live_since_s != float("inf")

    @property
    def residency(self) -> Residency | None:
        """None until an engine is known, and for models whose vocabulary cannot be read."""
        return self._residency

    @property
    def costs(self) -> Costs:
        """Measured so far."""
        return self._costs.costs()

    def snapshot(self) -> Iterable[tuple[Tier, Sequence[int], Sequence[int]]]:
        """All resident boundaries."""
        return self._residency.snapshot() if self._residency is not None else ()

    async def run(self) -> None:
        """Map and publish what changed, until cancelled."""
        while True:
            await self._dirty.wait()
            await asyncio.sleep(FLUSH_DELAY_S)
            self.flush()

    def flush(self) -> None:
        """Map and publish now. A bug of ours costs what it was met in: one request's places, at worst the picture."""
        self._dirty.clear()
        if self._residency is None:
            return
        try:
            with self._metrics.flush_seconds.time():
                changes = self._residency.flush()
                self._publisher.publish(changes.publish, changes.retract)
        except Exception as error:  # noqa: BLE001  the agent would end, and meet it again
            log_defect(log, "what changed could not be published, starting a new picture", error)
            self._metrics.flushes_broken.inc()
            self._start_over("a bug of the agent")
        while self._residency.defects:
            log_defect(log, "a request's boundaries could not be placed", self._residency.defects.popleft())

    def _touch(self) -> None:
        self.changed_since_save = True
        self._dirty.set()

    # -- KV events ---------------------------------------------------------------------------------------------------

    def kv_batch(self, batch: Batch) -> None:
        """Apply one batch."""
        self._heard_s = self._clock()
        self.uncached_since_s = float("inf")
        self.last_event_s = max(self.last_event_s, batch.at_s)
        self._metrics.event_batches.inc()
        self._metrics.events.inc(len(batch.events))
        if self._residency is None or batch.rank:
            return  # one rank an engine: the adapter refuses more
        for event in batch.events:
            self._residency.event(event)
            self._progressed(event, batch.at_s)
        self._touch()

    def _progressed(self, event: Mapping[str, Any], at_s: float) -> None:
        label, tokens = event.get("session_id"), event.get("token_ids")
        if not isinstance(label, str) or not isinstance(tokens, list):
            return
        self.backlog.stored(label, len(tokens))
        if (progress := self._running.get(label)) is not None:
            progress.stored(self._monotonic_of(at_s), len(tokens))

    def disk(self, maps: Iterable[bytes], found: Iterable[tuple[int, int | None]], gone: Sequence[int]) -> None:
        """What lies on the engine's disk; `maps`: what agents knew of the texts there."""
        if self._residency is None:
            return
        for saved in maps:
            self._residency.restore(saved)
        self._residency.on_disk(found, gone)
        self._touch()

    def mounts(self, store: str) -> None:
        """The engine's chunks are in this shared directory; "": in one of its own."""
        self.store = store
        if self._residency is not None:
            self._residency.share_disk(bool(store))
            self._dirty.set()

    def kv_lost(self, reason: str) -> None:
        """The event stream had a hole: start over, and let the engine tell again what it reuses."""
        log.warning("KV events were lost, starting a new picture", extra={"reason": reason})
        self._metrics.events_lost.inc()
        self._start_over("events lost")

    def _start_over(self, reason: str) -> None:
        if self._residency is not None:
            self._residency.reset()
        self._publisher.restart(reason)
        self.heal()

    def kv_replayed(self, batches: int) -> None:
        """A replay ended."""
        self._metrics.replays.inc()
        self._metrics.replayed.inc(batches)

    # -- notes -------------------------------------------------------------------------------------------------------

    def hello(self, hello: notes.GateHello) -> None:
        """A gate connected."""
        self._metrics.notes_lost.inc(hello.dropped)
        self._greeted(hello)

    def note_bad(self) -> None:
        """A note could not be read."""
        self._metrics.notes_bad.inc()

    def arrival(self, note: notes.Arrival) -> None:
        """A request passed the gate."""
        self._metrics.notes.labels("arrival").inc()
        self._timeline.arrived(note.id, note.at_s)
        self._running[note.id] = Progress(note.at_s, len(note.body), note.full)
        if len(self._running) > MAX_RUNNING:
            self._running.popitem(last=False)
        predicted = 0
        if self._residency is not None:
            at = datetime.fromtimestamp(self._wall_of(note.at_s), UTC)
            self._residency.arrival(note, at.date().isoformat())
            predicted = self._residency.predicted(note.id)
            self._touch()
        self.backlog.arrived(note.id, len(note.body), predicted)
        self._nudge()

    def end(self, note: notes.End) -> None:
        """An answer is over."""
        self._metrics.notes.labels("end").inc()
        self.backlog.ended(note.id)
        started = self._running.pop(note.id, None)
        finished = self._residency.end(note) if self._residency is not None else None
        if started is not None:
            figures = finished or parse_answer(note.body)
            self._learn(note, started, figures)
            if finished is not None and started.at_s >= self._live_since_s:
                self._compare(finished)
        if finished is not None:
            self._touch()
        self._nudge()

    def cache_reset(self, note: notes.CacheReset) -> None:
        """The engine publishes a reset only with its next step; one that its events include already must not count twice.

        A new picture, not retractions: routers must also forget what requests that ended a moment ago made them expect.
        """
        self._metrics.notes.labels("cache_reset").inc()
        if self._residency is None:
            return
        if self._wall_of(note.at_s) > self.last_event_s:
            self._residency.cleared(note.external)
        self._touch()
        self.flush()
        self._publisher.restart("cache reset")

    def _wall_of(self, monotonic_s: float) -> float:
        return self._wall() - (self._clock() - monotonic_s)

    def _monotonic_of(self, wall_s: float) -> float:
        return self._clock() - (self._wall() - wall_s)

    # -- closed loop -------------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """Ask the engine to announce again what the next requests reuse."""
        if self._command(notes.ReportFull(HEAL_REQUESTS)):
            self._metrics.report_full.inc(HEAL_REQUESTS)

    def _learn(self, note: notes.End, started: Progress, figures: Finished | Answer) -> None:
        """Costs, from requests whose answer says how long they were; the others still tell who ran beside whom."""
        prompt, cached, output = figures.prompt_tokens or 0, figures.cached_tokens or 0, figures.output_tokens or 0
        self.backlog.learned(started.body_bytes, prompt)
        streamed, first_s = not note.body.startswith(b"{"), note.first_s
        if not streamed and (prefill_end_s := started.prefill_end_s(prompt, cached, self.block_tokens)):
            streamed, first_s = True, min(prefill_end_s, note.at_s)
        served = Served(
            id=note.id,
            at_s=started.at_s,
            first_s=first_s,
            end_s=note.at_s,
            uncached=max(0, prompt - cached),
            cached=cached,
            output=output if prompt and note.status == 200 and not note.aborted else 0,
            streamed=streamed,
        )
        for clean in self._timeline.ended(served):
            self._costs.observe(clean)
        if served.uncached > self.block_tokens > 0 and self._heard_s < started.at_s:
            self.uncached_since_s = min(self.uncached_since_s, self._clock())

    def _prefill_s(self, served: Served) -> float:
        return self._costs.prefill_s(served)

    def _compare(self, finished: Finished) -> None:
        """Prediction against the engine's word. A request that found more than was known is a reason to ask for more."""
        predicted, actual = finished.predicted_tokens, finished.cached_tokens
        if not finished.comparable or predicted is None or actual is None:
            return
        self._metrics.predicted(predicted, actual, self.block_tokens)
        self._metrics.cached_tokens.inc(actual)
        self._metrics.prompt_tokens.inc(finished.prompt_tokens or 0)
        if actual - predicted > self.block_tokens:
            self.heal()
