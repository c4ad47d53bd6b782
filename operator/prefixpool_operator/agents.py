"""Asks agents how their engines are (`/info`). One that does not answer is left out: the plan lives with gaps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol

import aiohttp
import msgspec

from prefixpool import listening, names
from prefixpool.wire import Info
from prefixpool_operator.identity import L_COMPONENT, Component
from prefixpool_operator.observed import Raw

_log = logging.getLogger(__name__)

_AT_ONCE: Final = 64
_PATIENCE_S: Final = 10.0  # for all agents of a pool: where none can be reached, the pool is looked after all the same
_LONGEST_BYTES: Final = 1 << 20


class Agents(Protocol):
    """Who can be asked."""

    async def infos(self, pods: Iterable[Raw], key: str) -> Mapping[str, Info]:
        """By pod name, of those that answered. Never raises for an agent's sake."""
        ...


class HttpAgents:
    """Agents at their pods' addresses. `timeout_s` is for one answer."""

    def __init__(self, session: aiohttp.ClientSession, *, timeout_s: float, port: int = names.AGENT_PORT) -> None:
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._port = port
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def infos(self, pods: Iterable[Raw], key: str) -> Mapping[str, Info]:
        asked = [pod for pod in pods if answers(pod)]
        found = await asyncio.gather(*(self._info(pod, key) for pod in asked))
        return {pod["metadata"]["name"]: info for pod, info in zip(asked, found, strict=True) if info is not None}

    async def _info(self, pod: Raw, key: str) -> Info | None:
        address = pod["status"]["podIP"]
        url = f"http://{listening.in_url(address)}:{self._port}{names.PATH_INFO}"
        headers = {"Authorization": f"Bearer {key}"}
        # Nowhere else: whoever runs a pod would have the operator's way into the cluster's network.
        how: dict[str, Any] = {"headers": headers, "timeout": self._timeout, "allow_redirects": False}
        try:
            async with asyncio.timeout(_PATIENCE_S), self._slots, self._session.get(url, **how) as answer:
                answer.raise_for_status()
                return msgspec.json.decode(await _body(answer.content), type=Info)
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
            said = str(error) or "no answer in time"
            _log.debug("an agent did not answer", extra={"pod": pod["metadata"]["name"], "error": said})
            return None


async def _body(content: aiohttp.StreamReader) -> bytes:
    """Cut where it gets too long: whoever runs a pod may answer anything."""
    found = bytearray()
    async for chunk in content.iter_any():
        found += chunk
        if len(found) > _LONGEST_BYTES:
            break
    return bytes(found)


def answers(pod: Raw) -> bool:
    """Whether an agent may be listening there: a worker with an address whose container runs."""
    labels: Mapping[str, str] = pod["metadata"].get("labels") or {}
    status: Mapping[str, Any] = pod.get("status") or {}
    running = any("running" in (c.get("state") or {}) for c in status.get("containerStatuses") or ())
    return labels.get(L_COMPONENT) == Component.WORKER and bool(status.get("podIP")) and running
