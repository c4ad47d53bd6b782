"""Memory of a router process: flat beside a hundred agents, bounded whatever they hold (peers.md 31, 49)."""

from __future__ import annotations

from pathlib import Path

from prefixpool_testing.busy_fleet import busy_fleet
from prefixpool_testing.eventually import eventually

AGENTS = 100
FLAT_BYTES = 4 << 20  # garbage, and what allocators keep; boundaries that stayed would be three times as much
SLACK_BYTES = 32 << 20


async def test_memory_is_flat_beside_a_hundred_agents__peers_31(tmp_path: Path) -> None:
    """Some seconds of what e2e/soak does for five minutes."""
    async with busy_fleet(tmp_path, AGENTS, "--explain-last=0") as fleet:
        await fleet.live(1)
        before = fleet.router.rss_bytes
        await fleet.live(3)
        assert fleet.router.rss_bytes - before < FLAT_BYTES
        report = await fleet.router.report()
        assert len([view for view in report.replicas if view.usable and view.mode == "precise"]) == AGENTS


async def test_a_million_distinct_prefixes_stay_within_the_bound__peers_49(tmp_path: Path) -> None:
    bound, published = 32 << 20, 1_000_000
    async with busy_fleet(tmp_path, 20, "--index-bytes", str(bound)) as fleet:
        before = fleet.router.rss_bytes
        for _ in range(published // 20 // 2000):
            for agent in fleet.agents:
                await fleet.publish(agent, 2000)

        async def counted() -> bool:
            report = await fleet.router.report()
            assert report.index_bytes <= bound
            return report.index_boundaries + report.index_evictions == published

        await eventually(counted, what="everything that was published is known or was evicted")
        assert (await fleet.router.report()).index_evictions > published // 2
        assert fleet.router.rss_bytes - before < bound + SLACK_BYTES
        assert await fleet.router.metric("prefixpool_router_index_evictions_total") > published // 2
