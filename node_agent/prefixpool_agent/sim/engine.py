"""Runs the scheduler in real (or scaled) time and hands tokens to whoever waits for them: the shell around the pure core."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import NamedTuple

from prefixpool_agent.sim.detokenizer import Detokenizer
from prefixpool_agent.sim.events import EventPublisher
from prefixpool_agent.sim.metrics import SimMetrics
from prefixpool_agent.sim.scheduler import Scheduler, Step
from prefixpool_agent.sim.sequence import Limits, Scope, Sequence
from prefixpool_agent.sim.timing import TimingModel

_log = logging.getLogger(__name__)


class Ask(NamedTuple):
    """One prompt and how many replies it wants."""

    prompt: list[int]
    limits: Limits
    scope: Scope
    stop: tuple[str, ...] = ()
    replies: int = 1
    seed: int | None = None


class Output(NamedTuple):
    """What one step brought to one reply (by number). `finish` is set on its last output."""

    reply: int
    token: int | None
    text: str
    finish: str | None = None
    stop_reason: str | int | None = None


class _Stream:
    """One reply on its way to a client, with the times that metrics want."""

    __slots__ = ("asked_s", "detokenizer", "generation", "index", "last_s", "scheduled_s")

    def __init__(self, generation: Generation, index: int, stop: tuple[str, ...], now_s: float) -> None:
        self.generation = generation
        self.index = index
        self.detokenizer = Detokenizer(stop)
        self.asked_s = self.scheduled_s = now_s
        self.last_s = 0.0  # when its latest token came; 0 = none yet


class Generation:
    """The replies to a request's prompts, as one stream of outputs that ends when all of them have ended.

    Each prompt has the same number of replies: reply `index` answers prompt `index // replies`.
    """

    def __init__(self, sequences: list[Sequence], *, prompts: int = 1) -> None:
        self.sequences = sequences
        self.replies = len(sequences) // prompts
        self._queue: asyncio.Queue[Output] = asyncio.Queue()
        self._open = len(sequences)

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counts once."""
        return sum(sequence.prompt_tokens for sequence in self.sequences[:: self.replies])

    @property
    def cached_tokens(self) -> int:
        """Of the last prompt alone, which is what vLLM reports for a list of them."""
        return max(self.sequences[-self.replies].cached, 0)

    @property
    def output_tokens(self) -> int:
        return sum(sequence.output_tokens for sequence in self.sequences)

    def put(self, output: Output) -> None:
        self._queue.put_nowait(output)

    async def outputs(self) -> AsyncIterator[Output]:
        while self._open:
            output = await self._queue.get()
            self._open -= output.finish is not None
            yield output


class Engine:
    """One engine core. `run()` is its loop; everything happens on one event loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        timing: TimingModel,
        publisher: EventPublisher,
        metrics: SimMetrics,
        *,
        time_scale: float,
    ) -> None:
        self.scheduler = scheduler
        self.publisher = publisher
        self.metrics = metrics
        self._timing = timing
        self._time_scale = time_scale
        below, block_tokens = scheduler.below, scheduler.config.block_tokens
        self._loads = metrics.with_tiers(below, block_tokens) if below.exists else None
        self._streams: dict[Sequence, _Stream] = {}
        self._wake = asyncio.Event()
        self._closed = False
        self.failed = asyncio.Event()

    def open(self) -> None:
        """Sockets for events, and the disk tier. Raises zmq.ZMQError if an endpoint cannot be bound."""
        self.publisher.open()
        if self.scheduler.below.disk is not None:
            self.scheduler.below.disk.open()

    async def shut(self) -> None:
        """What `open` opened."""
        await self.publisher.close()
        if self.scheduler.below.disk is not None:
            self.scheduler.below.disk.close()

    def submit(self, *asks: Ask) -> Generation:
        """Queue prompts; the outputs of all their replies come from the returned generation, numbered through."""
        now_s = time.monotonic()
        block_tokens = self.scheduler.config.block_tokens
        replies = [(ask, index) for ask in asks for index in range(ask.replies)]
        sequences = [
            Sequence(ask.prompt, ask.limits, ask.scope, block_tokens=block_tokens, variant=_variant(index, ask.seed))
            for ask, index in replies
        ]
        generation = Generation(sequences, prompts=len(asks))
        for number, (sequence, (ask, _)) in enumerate(zip(sequences, replies, strict=True)):
            self._streams[sequence] = _Stream(generation, number, ask.stop, now_s)
            self.scheduler.add(sequence)
        self._wake.set()
        if self._closed:
            self.abort(generation, counted=True)
        return generation

    def abort(self, generation: Generation, *, counted: bool = False) -> None:
        """End what still runs, with `finish_reason` abort. vLLM counts shutdown's aborts, but not clients that went away."""
        for sequence in generation.sequences:
            stream = self._streams.pop(sequence, None)
            if stream is None:
                continue
            self.scheduler.remove(sequence, "abort")
            generation.put(Output(stream.index, None, "", "abort"))
            if counted:
                self.metrics.success["abort"].inc()

    def close(self) -> None:
        """End everything; what is submitted later ends at once."""
        self._closed = True
        for stream in list(self._streams.values()):
            self.abort(stream.generation, counted=True)

    async def run(self) -> None:
        """Until cancelled. If it ends otherwise `failed` is set, and whoever waits is told."""
        try:
            await self._run()
        except Exception:  # noqa: BLE001 - a fault of the scheduler must not leave clients waiting for ever
            _log.exception("engine loop failed")
            self.failed.set()
            self.close()

    async def _run(self) -> None:
        """Step for as long as there is work. A step's outputs and events appear when its time is over."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            due_s = loop.time()
            while self.scheduler.busy:
                step = self.scheduler.schedule()
                self._admitted(step)
                self.scheduler.execute(step)  # before the wait: an abort meanwhile must leave computed blocks behind
                # From when the last step was due, not from now, or the loop's own work would slow the engine down.
                due_s = max(due_s + self._timing.seconds(step.shape()) * self._time_scale, loop.time())
                await asyncio.sleep(due_s - loop.time())
                self._deliver(step)
                self.publisher.publish(self.scheduler.take_events())
            self._flush_tier_events()
            self._wake.clear()

    def observe_gauges(self) -> None:
        """Set the gauges from the state as it is."""
        waiting = len(self.scheduler.waiting)
        self.metrics.running.set(len(self.scheduler.running))
        self.metrics.waiting.set(waiting)
        self.metrics.waiting_capacity.set(waiting)
        self.metrics.kv_usage.set(self.scheduler.pool.usage)

    def _flush_tier_events(self) -> None:
        """vLLM runs one more step for finished requests, which announces the last stores of the tiers below the device."""
        if self.scheduler.below.exists:
            self.publisher.publish(self.scheduler.take_events())

    def _admitted(self, step: Step) -> None:
        metrics, now_s = self.metrics, time.monotonic()
        metrics.preemptions.inc(step.preempted)
        metrics.iteration_tokens.observe(sum(item.new for item in step.work))
        for sequence in step.admitted:
            stream = self._streams.get(sequence)
            if stream is not None:
                stream.scheduled_s = now_s
                metrics.queue_time.observe(now_s - stream.asked_s)
            self._count_prompt(sequence)
        if self._loads is not None:
            host_s, disk_s = self._timing.load_s(step.shape())
            self._loads.host_s.inc(host_s * self._time_scale)
            self._loads.disk_s.inc(disk_s * self._time_scale)

    def _count_prompt(self, sequence: Sequence) -> None:
        metrics, total, prompt = self.metrics, sequence.cached, sequence.prompt_tokens
        below = sequence.cached_host + sequence.cached_disk
        metrics.queries.inc(prompt)
        metrics.hits.inc(total - below)
        metrics.cached_device.inc(total - below)
        if self._loads is not None:
            metrics.external_queries.inc(prompt - (total - below))
            metrics.external_hits.inc(below)
            metrics.cached_host.inc(sequence.cached_host)
            metrics.cached_disk.inc(sequence.cached_disk)
            metrics.transferred.inc(below)
        metrics.cached_tokens.inc(total)
        metrics.cache_hit.inc(total - below)
        metrics.computed.inc(prompt - total)

    def _deliver(self, step: Step) -> None:
        now_s = time.monotonic()
        for sequence in self.scheduler.sample(step):
            stream = self._streams.get(sequence)
            if stream is None:
                continue
            token = sequence.tokens[-1]
            text = stream.detokenizer.push(token, last=sequence.finish is not None)
            stop_reason: str | int | None = sequence.stop_token
            if stream.detokenizer.matched is not None:
                stop_reason = stream.detokenizer.matched
                if sequence.finish is None:
                    self.scheduler.remove(sequence, "stop")
                sequence.finish = "stop"
            self._observe(sequence, stream, now_s)
            stream.generation.put(Output(stream.index, token, text, sequence.finish, stop_reason))
            if sequence.finish is not None:
                self._streams.pop(sequence, None)

    def _observe(self, sequence: Sequence, stream: _Stream, now_s: float) -> None:
        metrics = self.metrics
        metrics.generation_tokens.inc()
        if stream.last_s:
            metrics.inter_token.observe(now_s - stream.last_s)
        else:
            metrics.ttft.observe(now_s - stream.asked_s)
            metrics.prefill_time.observe(now_s - stream.scheduled_s)
            metrics.prompt_tokens.inc(sequence.prompt_tokens)
            metrics.prefill_computed.observe(sequence.prompt_tokens - max(sequence.cached, 0))
        stream.last_s = now_s
        if sequence.finish is not None:
            metrics.success[sequence.finish].inc()
            metrics.e2e.observe(now_s - stream.asked_s)


def _variant(index: int, seed: int | None) -> str:
    return f"{index or ''}{'' if seed is None else f' seed {seed}'}"
