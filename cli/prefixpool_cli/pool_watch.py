"""Following one replica until it is ready: supervisor state, engine log and the agent's own word, told as they change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp
import msgspec

from prefixpool import names, wire
from prefixpool.downloading import amount
from prefixpool_agent.supervisor_client import EnginePhase, SupervisorState, read_state
from prefixpool_cli.errors import PoolError
from prefixpool_cli.pool_files import tail
from prefixpool_cli.pool_process import Process

POLL_S: Final = 0.2
ANSWER_S: Final = 2.0
_DOWNLOAD_STEPS: Final = 100


class Stage(NamedTuple):
    """Where a part of the pool is on its way up. `fraction`: 0 to 1, a guess."""

    part: str
    words: str
    fraction: float
    elapsed_s: float
    ready: bool = False


Progress = Callable[[Stage], None]
LogStage = Callable[[Path], tuple[str, float]]  # what the engine's log says: words, fraction


class Replica(NamedTuple):
    """One replica of a local pool."""

    name: str
    run_dir: Path
    engine_url: str
    agent_url: str
    process: Process

    def supervisor(self) -> SupervisorState | None:
        """What its supervisor last wrote; None before that. Raises SupervisorError if it is unreadable."""
        return read_state(self.run_dir)


async def agent_info(http: aiohttp.ClientSession, replica: Replica, key: str) -> wire.Info | None:
    """The agent's `/info`; None while it does not answer. Raises PoolError for an answer that makes no sense."""
    try:
        async with http.get(
            replica.agent_url + names.PATH_INFO,
            headers={"authorization": f"Bearer {key}"},
            timeout=aiohttp.ClientTimeout(total=ANSWER_S),
        ) as answer:
            body = await answer.read()
    except (aiohttp.ClientError, TimeoutError):
        return None
    if answer.status != 200:
        raise PoolError(f"{replica.name}: the agent answers {answer.status} to {names.PATH_INFO}")
    try:
        return msgspec.json.decode(body, type=wire.Info)
    except msgspec.DecodeError as error:
        raise PoolError(f"{replica.name}: {names.PATH_INFO} is not what this version understands: {error}") from error


class Watcher:
    """Follows one replica from its start. `restarts`: engine starts that may fail before the pool gives up."""

    def __init__(self, replica: Replica, key: str, log_stage: LogStage, *, restarts: int = 0) -> None:
        self._replica = replica
        self._key = key
        self._log_stage = log_stage
        self._restarts = restarts
        self._began = time.monotonic()

    async def until_ready(self, http: aiohttp.ClientSession, progress: Progress, timeout_s: float) -> wire.Info:
        """Raises PoolError with the reason and the end of the log if the engine dies, or is late (0: its worker decides).

        A download may take any time.
        """
        since = self._began
        while True:
            self._raise_if_dead()
            info = await agent_info(http, self._replica, self._key)
            if info is not None and info.state is wire.State.READY:
                progress(self._stage(f"ready: {info.device_tokens:,} tokens of cache", 1.0, ready=True))
                return info
            words, fraction = self._words(info)
            progress(self._stage(words, fraction))
            if info is not None and info.download is not None:
                since = time.monotonic()
            if 0 < timeout_s < time.monotonic() - since:
                raise self._failure(f"not ready after {timeout_s:.0f} s, last seen: {words}")
            await asyncio.sleep(POLL_S)

    def _stage(self, words: str, fraction: float, *, ready: bool = False) -> Stage:
        return Stage(self._replica.name, words, fraction, time.monotonic() - self._began, ready)

    def _words(self, info: wire.Info | None) -> tuple[str, float]:
        state = self._replica.supervisor()
        if state is None or state.engine.pid is None:
            return "starting the supervisor", 0.0
        words, fraction = self._log_stage(self._replica.run_dir / names.RUN_ENGINE_LOG)
        if info is None and fraction >= 1:
            return "engine is up, the agent is reading the tokenizer", 0.95
        if info is not None and info.download is not None:
            return download_words(info.download), 0.05
        return words, min(fraction, 0.99)

    def _raise_if_dead(self) -> None:
        code = self._replica.process.returncode
        if code is not None:
            raise self._failure(f"its supervisor ended with code {code}")
        state = self._replica.supervisor()
        if state is None:
            return
        if state.engine.phase is EnginePhase.GAVE_UP or state.engine.restarts > self._restarts:
            raise self._failure(state.engine.reason or "the engine ended")

    def _failure(self, what: str) -> PoolError:
        engine_log = self._replica.run_dir / names.RUN_ENGINE_LOG
        log = tail(engine_log) or tail(self._replica.process.log)
        return PoolError(f"{self._replica.name}: {what}", f"the end of its log:\n{log}" if log else "")


def download_words(download: wire.Download) -> str:
    """How far it is, or why it does not go on."""
    return download.problem or f"downloading the model: {amount(download, _DOWNLOAD_STEPS)}"
