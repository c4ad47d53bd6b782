"""Light health probes, only for replicas of which nothing else tells: no agent speaks for them, or they are down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import aiohttp

from prefixpool import names
from prefixpool_router.fleet import Fleet
from prefixpool_router.reach import KEY_REFUSED, Key
from prefixpool_router.replica import Replica

PROBE_S: Final = 2.0  # deadline of one probe
_SILENT: Final = f"no answer within {PROBE_S:g} s"
_CALM: Final = 5  # a plain backend that answers is asked this many times less often
_UNAUTHORISED: Final = 401
_TELLS_NOTHING: Final = frozenset({404, 405, 501, _UNAUTHORISED})  # plain OpenAI backends need not have /health, nor open it


class Prober:
    """Asks `/health`, or `/v1/models` where there is none, or where the key is in question: vLLM wants it there only."""

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
        if not replica.needs_probe and replica.reach.key is Key.TAKEN:
            return False
        waited_s = self._fleet.clock() - replica.created_s
        if replica.member.agent and not replica.was_told and waited_s < self._fleet.settings.agent_grace_s:
            return False  # its agent may be about to say that the engine is still loading
        # One whose agent fell silent is asked at once: its whole machine may be gone.
        plain = replica.member.agent is None and replica.name not in self._silent
        calm = plain and replica.reach.key is Key.TAKEN and self._fleet.verdict(replica.name).usable
        return not calm or self._turn % _CALM == 0

    async def _probe(self, replica: Replica) -> None:
        doubted = replica.reach.key is not Key.TAKEN
        problem = await self.ask(replica.member.engine, key_doubted=doubted)
        if problem == KEY_REFUSED:
            self._silent.discard(replica.name)
            replica.refused_key()
        elif doubted and not problem:
            replica.came_up()
        elif replica.needs_probe:  # else its agent speaks for it
            self._judge(replica, problem)

    def _judge(self, replica: Replica, problem: str) -> None:
        if problem == _SILENT and replica.member.agent is None and replica.name not in self._silent:
            self._silent.add(replica.name)
            return
        self._silent.discard(replica.name)
        if problem:
            replica.went_down(problem)
        else:
            replica.came_up()

    async def ask(self, engine: str, *, key_doubted: bool = False) -> str:
        """Why the engine at this origin does not answer, or not us; "" if it does."""
        try:
            async with asyncio.timeout(PROBE_S):
                status = await self._status(engine + (path := names.PATH_HEALTH))
                if status in _TELLS_NOTHING or (key_doubted and status < 500):
                    status = await self._status(engine + (path := "/v1/models"))
                if status == _UNAUTHORISED:
                    return KEY_REFUSED
                return "" if status < 500 else f"{path} answers {status}"
        except TimeoutError:
            return _SILENT
        except (aiohttp.ClientError, OSError) as error:
            return f"no connection: {error}"

    async def _status(self, url: str) -> int:
        key = self._key()
        headers = {"Authorization": f"Bearer {key}"} if key else None
        async with self._http.get(url, headers=headers, allow_redirects=False) as answer:
            return answer.status
