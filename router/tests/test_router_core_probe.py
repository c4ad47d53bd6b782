"""Health probes of replicas that no agent speaks for. The answers are scripted; nothing waits."""

from __future__ import annotations

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from prefixpool_router import probe
from prefixpool_router.fleet import Fleet, FleetSettings
from prefixpool_router.knowledge import Knowledge
from prefixpool_router.membership import Member
from prefixpool_router.metrics import RoutingMetrics
from prefixpool_router.probe import Prober
from prefixpool_router.replica import Replica

SILENT = probe._SILENT


class Scripted(Prober):
    """Its engines say what the test wants."""

    def __init__(self, fleet: Fleet, http: aiohttp.ClientSession) -> None:
        super().__init__(fleet, http, lambda: "", 1.0)
        self.says = ""

    async def ask(self, engine: str) -> str:
        return self.says

    async def turn(self, replica: Replica, says: str) -> bool:
        """Whether the replica is usable after a probe."""
        self.says = says
        await self._probe(replica)
        return self._fleet.verdict(replica.name).usable


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(Knowledge(1 << 20), RoutingMetrics(CollectorRegistry()), FleetSettings(), lambda: 100.0)


def joined(fleet: Fleet, agent: str | None) -> Replica:
    fleet.apply([Member(name="a", engine="http://a:1", agent=agent)])
    return fleet.replicas["a"]


async def test_one_missed_probe_took_a_busy_plain_backend_out(fleet: Fleet) -> None:
    async with aiohttp.ClientSession() as http:
        prober, replica = Scripted(fleet, http), joined(fleet, None)
        assert await prober.turn(replica, "")
        assert await prober.turn(replica, SILENT)
        assert prober._is_due(replica), "it is asked again soon"
        assert await prober.turn(replica, "")
        assert await prober.turn(replica, SILENT), "an answer between two misses forgives the first"
        assert not await prober.turn(replica, SILENT)
        assert await prober.turn(replica, "")


@pytest.mark.parametrize(("agent", "says"), [(None, "no connection: refused"), ("http://a:2", SILENT)])
async def test_what_is_certain_counts_at_once(fleet: Fleet, agent: str | None, says: str) -> None:
    async with aiohttp.ClientSession() as http:
        prober, replica = Scripted(fleet, http), joined(fleet, agent)
        assert await prober.turn(replica, "")
        assert not await prober.turn(replica, says)
