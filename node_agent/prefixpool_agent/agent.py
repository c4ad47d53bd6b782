"""One engine's agent: attaches to each engine start, tells the routers its state, carries out drains. Wired in `main`."""

from __future__ import annotations

import asyncio
import logging
import time
from importlib.metadata import version
from typing import Final

import msgspec

from prefixpool import names, wire
from prefixpool_agent.attachment import Attachment, GateView, Parts
from prefixpool_agent.cgroup import MemoryWatch
from prefixpool_agent.download import state as download
from prefixpool_agent.drain import Drain, View
from prefixpool_agent.engine_client import EngineClient, EngineError
from prefixpool_agent.engine_state import EngineState, EventEvidence, Observed, judge, judge_mode
from prefixpool_agent.engine_watch import Look
from prefixpool_agent.figures import EngineFigures
from prefixpool_agent.map_keeper import MapKeeper
from prefixpool_agent.metrics import AgentMetrics
from prefixpool_agent.model_text import read_model
from prefixpool_agent.publisher import Publisher
from prefixpool_agent.settings import AgentSettings
from prefixpool_agent.supervisor_client import EnginePhase, EngineProcess, SupervisorClient

TICK_S: Final = 0.5
REATTACH_S: Final = 5.0  # after a bug, which may strike again at once

log = logging.getLogger(__name__)


class Agent:
    """Owns the attachment and all periodic work. Also the `DrainActions` and the server's `AgentView`."""

    def __init__(
        self,
        settings: AgentSettings,
        parts: Parts,
        *,
        engine: EngineClient,
        supervisor: SupervisorClient,
        publisher: Publisher,
        metrics: AgentMetrics,
    ) -> None:
        self._settings = settings
        self._parts = parts
        self._engine = engine
        self._supervisor = supervisor
        self._publisher = publisher
        self._metrics = metrics
        self._gate = GateView(parts.run_dir / names.RUN_GATE_STATE)
        self._attachment: Attachment | None = None
        self._process = EngineProcess()
        self._look = Look(self._process, False, "")
        self._state = EngineState(wire.State.STARTING, 0, "the agent has just started")
        self._attach_problem = ""
        self._attach_after_s = 0.0
        self._figures = EngineFigures(engine, metrics, interval_s=settings.scrape_interval_s)
        self._maps = MapKeeper(parts.run_dir, parts.follower, metrics, interval_s=settings.save_interval_s)
        self._memory = MemoryWatch()
        self.oriented = asyncio.Event()  # it knows how the engine is; before that nothing is told of it
        self.drain = Drain(self, settings.drain_ack_s)

    # -- what is seen ------------------------------------------------------------------------------------------------

    async def saw(self, look: Look) -> None:
        """One look at the engine: attach, detach, tell."""
        failed = self._attachment is not None and self._attachment.failed
        if failed or look.process.epoch != self._process.epoch or look.process.phase is not EnginePhase.RUNNING:
            await self._detach(look)
        if look.process.epoch != self._process.epoch:
            self._began(look.process)
        self._process, self._look = look.process, look
        if failed:
            self._attach_after_s = time.monotonic() + REATTACH_S
        if look.healthy and self._attachment is None and time.monotonic() >= self._attach_after_s:
            await self._attach(look.process.epoch)
        running_somehow = look.process.phase is EnginePhase.RUNNING and not (look.reason or self._attach_problem)
        if self._attachment is not None or not running_somehow:
            self.oriented.set()
        self._tell_state()

    def _began(self, process: EngineProcess) -> None:
        log.info("engine start", extra={"epoch": process.epoch, "pid": process.pid})
        self._metrics.epochs.inc()
        self._gate.reopen()
        if self.drain.active:
            self.drain.forget()
            self._gate.fence(self.drain.active)

    async def _attach(self, epoch: int) -> None:
        try:
            facts = await self._engine.facts()
        except EngineError as error:
            self._attach_problem = str(error)
            return
        self._attach_problem = ""
        await self._read_text()
        self._attachment = Attachment(self._parts, epoch, facts)
        self._publisher.welcome(self._welcome(epoch), "engine restarted")
        log.info("attached to the engine", extra={"epoch": epoch, "device_blocks": facts.device_blocks})

    async def _read_text(self) -> None:
        """Of a model that was not here when the agent started."""
        if self._parts.text.problem:
            folder = download.model_folder(self._parts.run_dir, self._settings.model)
            self._parts = self._parts._replace(text=await asyncio.to_thread(read_model, self._settings.engine, folder))

    async def _detach(self, look: Look) -> None:
        attachment, self._attachment = self._attachment, None
        if attachment is None:
            return
        log.warning("engine is gone", extra={"epoch": attachment.epoch, "reason": look.reason})
        self._figures.forget()
        self._parts.notes.begin(0)
        await attachment.close()
        self._parts.follower.forget("engine ended")
        self._parts.disk.soon()
        self._tell_state()

    def _welcome(self, epoch: int) -> wire.Welcome:
        facts = self._attachment.facts if self._attachment is not None else None
        return wire.Welcome(
            replica=self._settings.replica,
            epoch=epoch,
            models=facts.models if facts is not None else (self._settings.served_model_name,),
            block_tokens=facts.block_tokens if facts is not None else self._settings.block_tokens,
            device_tokens=facts.device_tokens if facts is not None else 0,
            host_bytes=self._settings.host_kv_bytes,
            max_inflight=self._settings.max_inflight,
            template=self._parts.text.template,
        )

    # -- what is told ------------------------------------------------------------------------------------------------

    def _tell_state(self) -> None:
        healthy = self._look.healthy and self._attachment is not None
        reason = self._attach_problem if self._look.healthy else self._look.reason
        process = self._look.process
        self._state = judge(Observed(process.phase, process.epoch, healthy, self._gate.fenced, reason or ""))
        mode, why = self._mode()
        status = wire.Status(
            state=self._state.state,
            epoch=self._state.epoch,
            mode=mode,
            reason=self._state.reason or why,
            store=self._parts.follower.store,
            disk=self._parts.disk.problem or self._figures.disk.problem,  # of one that hangs the engine may count nothing
        )
        if self.oriented.is_set() and status != self._publisher.status:
            log.info("state", extra={"state": status.state.value, "mode": mode.value, "reason": status.reason})
            self._publisher.tell(status)
        self._metrics.in_state(status.state, mode, status.disk)

    def _mode(self) -> tuple[wire.Mode, str]:
        if self._attachment is None:  # an empty cache is known precisely; but what cannot be mapped never will be
            problem = self._parts.text.problem
            return (wire.Mode.APPROXIMATE if problem else wire.Mode.PRECISE), problem
        follower = self._parts.follower
        evidence = EventEvidence(
            healthy_since_s=self._attachment.since_s,
            connected=self._attachment.events.connected,
            uncached_since_s=follower.uncached_since_s,
            tokenizer=self._parts.text.problem,
        )
        return judge_mode(evidence, time.monotonic())

    def _costs(self) -> wire.Costs:
        host_s, disk_s = self._figures.last.load_s_per_token()
        return msgspec.structs.replace(self._parts.follower.costs, host_s_per_token=host_s, disk_s_per_token=disk_s)

    def load(self) -> wire.Load:
        """As routers see it. Cheap: read every 50 ms."""
        facts = self._attachment.facts if self._attachment is not None else None
        residency = self._parts.follower.residency
        used = residency.device_blocks if residency is not None else 0
        return wire.Load(
            inflight=self._gate.inflight,
            running=self._figures.last.running,
            waiting=self._figures.last.waiting,
            kv_usage=round(self._figures.last.kv_usage, 3),
            prefill_backlog_tokens=self._parts.follower.backlog.tokens,
            free_blocks=max(0, facts.device_blocks - used) if facts is not None else 0,
        )

    # -- periodic work -----------------------------------------------------------------------------------------------

    async def tick(self) -> None:
        """State, costs and the saved map, until cancelled."""
        while True:
            self._tell_state()
            self._metrics.memory(self._memory.look())
            costs = self._costs()
            if costs != self._publisher.costs:
                self._publisher.tell(costs)
            if self._attachment is not None:
                await self._maps.keep()
            await asyncio.sleep(TICK_S)

    async def scrape(self) -> None:
        """The engine's own figures, until cancelled."""
        await self._figures.run(lambda: self._attachment is not None, lambda: self._gate.inflight)

    async def close(self) -> None:
        """Stop; the engine runs on."""
        await self.drain.close()
        attachment, self._attachment = self._attachment, None
        if attachment is not None:
            await attachment.close()
        await self._parts.disk.close()
        self._gate.close()

    # -- drain -------------------------------------------------------------------------------------------------------

    def fence(self, on: bool) -> None:
        """Refuse new requests and tell the routers, or accept again."""
        if on:
            self._publisher.refence()
        self._gate.fence(on)
        self._tell_state()

    def view(self, now_s: float) -> View:
        """For the drain's next step."""
        return View(now_s, self._gate.inflight, self._publisher.unacknowledged())

    async def stop_engine(self) -> None:
        """Raises SupervisorError."""
        await self._supervisor.stop_engine(self._settings.engine_stop_timeout_s)

    async def clean(self) -> None:
        """The supervisor removed sockets and shared memory; the saved map is ours."""
        self._maps.forget()

    def phase_changed(self, phase: wire.DrainPhase) -> None:
        """For metrics."""
        self._metrics.in_drain(phase)

    # -- control API -------------------------------------------------------------------------------------------------

    def not_ready(self) -> str:
        """Why the engine takes no requests; "" = it does."""
        if self._state.state is wire.State.READY:
            return ""
        return f"engine is {self._state.state.value}" + (f": {self._state.reason}" if self._state.reason else "")

    def info(self) -> wire.Info:
        """For `/info`."""
        facts = self._attachment.facts if self._attachment is not None else None
        residency, process = self._parts.follower.residency, self._process
        status = self._publisher.status
        running = process.phase is EnginePhase.RUNNING
        return wire.Info(
            version=version("prefixpool"),
            replica=self._settings.replica,
            engine=self._settings.engine.value,
            engine_version=facts.version if facts is not None else "",
            epoch=process.epoch,
            state=self._state.state,
            reason=status.reason if status is not None else self._state.reason,
            mode=status.mode if status is not None else wire.Mode.NONE,
            models=facts.models if facts is not None else (self._settings.served_model_name,),
            block_tokens=facts.block_tokens if facts is not None else self._settings.block_tokens,
            device_blocks=facts.device_blocks if facts is not None else 0,
            device_tokens=facts.device_tokens if facts is not None else 0,
            host_bytes=self._settings.host_kv_bytes,
            disk_bytes=self._settings.disk_kv_bytes,
            boundaries=residency.boundaries if residency is not None else 0,
            resident_blocks=residency.resident_blocks().total() if residency is not None else 0,
            inflight=self._gate.inflight,
            running=self._figures.last.running,
            waiting=self._figures.last.waiting,
            restarts=process.restarts,
            engine_pid=(process.pid or 0) if running else 0,
            uptime_s=max(0.0, time.time() - process.started_ns / 1e9) if running else 0.0,
            template=self._parts.text.template,
            costs=self._costs(),
            drain=self.drain.status(),
            download=self._download(),
            memory=self._memory.look(),
            disk=status.disk if status is not None else None,
        )

    def _download(self) -> wire.Download | None:
        """While the engine waits for it, or was given up waiting."""
        waits = self._state.state in (wire.State.STARTING, wire.State.FAILED)
        found = download.read(self._parts.run_dir) if waits else None
        return found.download if found is not None and not found.folder else None

    def refresh(self) -> None:
        """Gauges that are cheaper to read than to keep."""
        self._metrics.engine_restarts.set(self._process.restarts)
        self._metrics.inflight.set(self._gate.inflight)
        self._metrics.gates.set(self._parts.notes.gates)
        self._metrics.costs(self._costs())
        if (residency := self._parts.follower.residency) is not None:
            facts = self._attachment.facts if self._attachment is not None else None
            self._metrics.resident(residency, facts.device_blocks if facts is not None else 0)
