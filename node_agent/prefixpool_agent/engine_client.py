"""The agent's HTTP requests to its engine: health, facts, load. Each has a deadline and a bound on the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import msgspec

from prefixpool import engine_key
from prefixpool.errors import PrefixpoolError, SettingsError
from prefixpool_agent.engines.base import EngineFacts
from prefixpool_agent.engines.metrics import EngineLoad, parse_load

HEALTH_S: Final = 5.0
READ_S: Final = 3.0
MAX_BYTES: Final = 4 << 20  # a busy vLLM's metrics are 100 KB


class EngineError(PrefixpoolError):
    """The engine did not answer as it should."""


class Health(NamedTuple):
    """`certain`: refused or an error status; a time-out may mean a busy API server."""

    good: bool
    certain: bool = True
    reason: str = ""


class EngineClient:
    """One engine, whatever start it is in."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, key_file: Path) -> None:
        self._session = session
        self._base = base_url.rstrip("/")
        self._key_file = key_file

    async def health(self) -> Health:
        """Never raises."""
        try:
            await self._get("/health", HEALTH_S)
        except TimeoutError:
            return Health(False, certain=False, reason=f"/health did not answer within {HEALTH_S:g} s")
        except EngineError as error:
            return Health(False, reason=str(error))
        return Health(True)

    async def load(self) -> EngineLoad:
        """Raises EngineError."""
        return parse_load(await self._text("/metrics"))

    async def facts(self) -> EngineFacts:
        """What it really allocated. Raises EngineError, also while the engine does not say yet."""
        cache = (await self.load()).cache
        if cache is None:
            raise EngineError("the engine's metrics say nothing of its KV cache yet")
        models = _json(await self._text("/v1/models")).get("data") or ()
        version = _json(await self._text("/version")).get("version")
        return EngineFacts(
            block_tokens=cache.block_tokens,
            device_blocks=cache.usable_blocks,
            version=str(version or ""),
            models=tuple(str(model["id"]) for model in models if isinstance(model, dict) and "id" in model),
        )

    async def _text(self, path: str) -> str:
        try:
            return await self._get(path, READ_S)
        except TimeoutError as error:
            raise EngineError(f"{path} did not answer within {READ_S:g} s") from error

    async def _get(self, path: str, deadline_s: float) -> str:
        """Raises TimeoutError or EngineError."""
        headers = {"authorization": f"Bearer {self._key()}"}
        timeout = aiohttp.ClientTimeout(total=deadline_s)
        try:
            async with self._session.get(self._base + path, headers=headers, timeout=timeout) as answer:
                body = await answer.content.read(MAX_BYTES)
                while len(body) < MAX_BYTES and (more := await answer.content.read(MAX_BYTES - len(body))):
                    body += more
                if answer.status != 200:
                    raise EngineError(f"{path} answered {answer.status}")
                return body.decode("utf-8", "replace")
        except aiohttp.ClientError as error:
            raise EngineError(f"{path}: {error}") from error

    def _key(self) -> str:
        """Read each time: rotation must not need a restart. Raises EngineError."""
        try:
            return engine_key.read_sent(self._key_file)
        except SettingsError as error:
            raise EngineError(str(error)) from error


def _json(text: str) -> dict[str, Any]:
    try:
        document = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise EngineError(f"the engine's answer is not JSON: {error}") from error
    return document if isinstance(document, dict) else {}
