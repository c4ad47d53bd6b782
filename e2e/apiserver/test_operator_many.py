"""Many pools at once: that they converge is a promise; how fast, and at what cost, is printed."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixpool_operator import kube
from prefixpool_testing.cluster.api_server import ApiServer, api_server
from prefixpool_testing.operated import SPEC, Place, operated

pytestmark = pytest.mark.timeout(900)

POOLS = int(os.environ.get("OPERATOR_POOLS", "100"))


@pytest.fixture
def api() -> Iterator[ApiServer]:
    """Its own: so many pools would be in the way of other tests."""
    with api_server() as started:
        yield started


async def test_hundreds_of_pools_converge(api: ApiServer) -> None:
    async with operated(api) as (client, operator):
        place = Place(api, client)
        empty_mib = memory_mib(operator.pid())
        since_bytes, started_at = api.audit_log.stat().st_size, time.monotonic()
        names = [f"p{number}" for number in range(POOLS)]
        pools = [
            {
                "apiVersion": kube.POOL.api_version,
                "kind": kube.POOL.kind,
                "metadata": {"name": name, "namespace": place.namespace},
                "spec": {**SPEC, "replicas": 1},
            }
            for name in names
        ]
        await asyncio.gather(*(client.create(kube.POOL, pool) for pool in pools))
        created_s = time.monotonic() - started_at

        for name in names:  # one after the other: asking for all of them again and again would be what is measured
            await place.until_replicas(name, 1, within_s=600)
        took_s = time.monotonic() - started_at
        asked = [one for one in api.asked(since_bytes) if one.user_agent.startswith("prefixpool-operator/")]
        writes = sum(one.writes for one in asked)
        print(
            f"\n{POOLS} pools: created in {created_s:.1f} s, converged in {took_s:.1f} s; {len(asked)} requests "
            f"({len(asked) / took_s:.0f}/s), {writes} writes ({writes / took_s:.0f}/s); "
            f"memory {empty_mib:.0f} -> {memory_mib(operator.pid()):.0f} MiB"
        )
        assert await operator.figure("pools") == POOLS


def memory_mib(pid: int) -> float:
    """Resident set."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
