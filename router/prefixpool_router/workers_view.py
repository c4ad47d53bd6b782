"""What several workers tell, as one: admin.Telling over their unix sockets. A worker that does not answer is left out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
import msgspec
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from prefixpool import names
from prefixpool.listing import listed
from prefixpool_router.admin import PATH_EXPLAIN, PATH_STATE, Explanations, Readiness, exposition
from prefixpool_router.drain import Draining
from prefixpool_router.metrics import WorkersMetrics
from prefixpool_router.state import StateReport

_log = logging.getLogger(__name__)
_STARTUP_S: Final = 30.0  # after which a worker that never was ready is no reason to send clients elsewhere
_TOLD: Final = 5  # workers, with their reasons, in one sentence
_ASK_S: Final = 2.0  # a worker's event loop that lags more than this is not well


class WorkersView:
    """Use as a context manager: it holds one HTTP session for each worker."""

    def __init__(self, sockets: Mapping[int, Path], metrics: WorkersMetrics, draining: Draining) -> None:
        self._sockets = sockets
        self._metrics = metrics
        self._draining = draining
        self._sessions: dict[int, aiohttp.ClientSession] = {}
        self._were_ready: set[int] = set()
        self._started_s = time.monotonic()

    async def __aenter__(self) -> Self:
        for worker, path in self._sockets.items():
            self._sessions[worker] = aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in self._sessions.values():
            await session.close()

    async def answers(self, worker: int) -> bool:
        """Whether its event loop turns."""
        return await self._ask_one(worker, names.PATH_HEALTHZ, None) is not None

    async def readiness(self) -> Readiness:
        """Once all have been ready, or had the time for it: ready if one is. One that starts again does not listen yet."""
        if self._draining.begun:
            return Readiness(False, "draining")
        answers = {w: msgspec.json.decode(body, type=_Ready) for w, body in (await self._ask(names.PATH_READYZ)).items()}
        ready = sorted(worker for worker, answer in answers.items() if answer.ready)
        self._were_ready.update(ready)
        starting = len(self._sockets) - len(self._were_ready)
        if ready and starting and time.monotonic() - self._started_s < _STARTUP_S:
            return Readiness(False, f"{starting} of {len(self._sockets)} workers are starting")
        if ready:
            return Readiness(True, f"{len(ready)} of {len(self._sockets)} workers ready; {answers[ready[0]].why}")
        told = [f"worker {worker}: {answer.why}" for worker, answer in sorted(answers.items())]
        return Readiness(False, listed(told, _TOLD, between="; ") or "no worker answers yet")

    async def state(self) -> StateReport:
        """Of all who answer."""
        answers = await self._ask(PATH_STATE)
        reports = [msgspec.json.decode(answers[worker], type=StateReport) for worker in sorted(answers)]
        return StateReport(workers=[worker for report in reports for worker in report.workers])

    async def explain(self, count: int, request_id: str) -> Explanations:
        """The newest of all workers."""
        answers = await self._ask(PATH_EXPLAIN, {"n": str(count), "request_id": request_id})
        lists = [msgspec.json.decode(body, type=Explanations).decisions for body in answers.values()]
        merged = sorted((decision for each in lists for decision in each), key=lambda d: d.at, reverse=True)
        return Explanations(merged[:count])

    async def metrics(self) -> bytes:
        """All series, with the label `worker`; and the parent's own."""
        answers = await self._ask(names.PATH_METRICS)
        self._metrics.answering.set(len(answers))
        registry = CollectorRegistry()
        registry.register(_Merged({worker: body.decode() for worker, body in answers.items()}))
        return exposition(registry) + exposition(self._metrics.registry)

    async def _ask(self, path: str, query: Mapping[str, str] | None = None) -> dict[int, bytes]:
        answers = await asyncio.gather(*(self._ask_one(worker, path, query) for worker in self._sessions))
        return {worker: body for worker, body in zip(self._sessions, answers, strict=True) if body is not None}

    async def _ask_one(self, worker: int, path: str, query: Mapping[str, str] | None) -> bytes | None:
        try:
            async with (
                asyncio.timeout(_ASK_S),
                self._sessions[worker].get(f"http://worker{path}", params=query or {}) as answer,
            ):
                return await answer.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:  # it is starting, or dead: workers.py sees to that
            _log.debug("worker does not answer", extra={"worker": worker, "error": type(error).__name__})
            return None


class _Ready(msgspec.Struct, frozen=True):
    ready: bool
    why: str


class _Merged(Collector):
    def __init__(self, texts: Mapping[int, str]) -> None:
        self._texts = texts

    def describe(self) -> Iterable[Metric]:
        return ()  # names are known only by collecting

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for worker, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                merged.samples += [_labelled(sample, worker) for sample in family.samples]
        return families.values()


def _labelled(sample: Any, worker: int) -> Any:
    return sample._replace(labels={**sample.labels, "worker": str(worker)})
