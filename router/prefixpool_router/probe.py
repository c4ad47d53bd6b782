"""Light health probes, only for replicas of which nothing else tells: no agent speaks for them, or they are down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import aiohttp

from prefixpool_router.fleet import Fleet
from prefixpool_router.replica import Replica

PROBE_S: Final = 2.0  # deadline of one probe
_SILENT: Final = f"no answer within {PROBE_S:g} s"
_CALM: Final = 5  # a plain backend that answers is asked this many times less often
_NO_HEALTH: Final = frozenset({404, 405, 501})  # plain OpenAI backends need not have /health


class Prober:
    """Asks `/health`, or `/v1/models` where there is none."""

    def __init__(self, fleet: Fleet, http: aiohttp.ClientSession, key: Callable[[], str], interval_s: float) -> None:
        self._fleet = fleet
        self._http = http
        self._key = key
        self._interval_s = interval_s
        self._turn = 0
        self._silent: set[str] = set()  # plain backends that missed a probe: one may only be busy, two are not

    async def run(self) -> None:
        """Never returns."""
        while True:
            due = [replica for replica in self._fleet.replicas.values() if self._is_due(replica)]
            await asyncio.gather(*map(self._probe, due))
            self._turn += 1
            await asyncio.sleep(self._interval_s)

    def _is_due(self, replica: Replica) -> bool:
        if not replica.needs_probe:
            return False
        waited_s = self._fleet.clock() - replica.created_s
        if replica.member.agent and not replica.was_told and waited_s < self._fleet.settings.agent_grace_s:
            return False  # its agent may be about to say that the engine is still loading
        # One whose agent fell silent is asked at once: its whole machine may be gone.
        plain = replica.member.agent is None and replica.name not in self._silent
        calm = plain and self._fleet.verdict(replica.name).usable
        return not calm or self._turn % _CALM == 0

    async def _probe(self, replica: Replica) -> None:
        problem = await self.ask(replica.member.engine)
        if not replica.needs_probe:
            return  # its agent spoke meanwhile
        if problem == _SILENT and replica.member.agent is None and replica.name not in self._silent:
            self._silent.add(replica.name)
            return
        self._silent.discard(replica.name)
        if problem:
            replica.went_down(problem)
        else:
            replica.came_up()

    async def ask(self, engine: str) -> str:
        """Why the engine at this origin does not answer; "" if it does."""
        try:
            async with asyncio.timeout(PROBE_S):
                status = await self._status(f"{engine}/health")
                if status in _NO_HEALTH:
                    status = await self._status(f"{engine}/v1/models")
                    return "" if status < 500 else f"/v1/models answers {status}"
                return "" if status < 500 else f"/health answers {status}"
        except TimeoutError:
            return _SILENT
        except (aiohttp.ClientError, OSError) as error:
            return f"no connection: {error}"

    async def _status(self, url: str) -> int:
        key = self._key()
        headers = {"Authorization": f"Bearer {key}"} if key else None
        async with self._http.get(url, headers=headers, allow_redirects=False) as answer:
            return answer.status
