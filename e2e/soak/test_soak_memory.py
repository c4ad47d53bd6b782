"""Memory of a router process over minutes (peers.md 31)."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixpool_testing.busy_fleet import busy_fleet

AGENTS = 100
WARM_UP_S = 40  # until the last 512 decisions are remembered
GROWTH = 0.05


@pytest.mark.timeout(3600)
async def test_memory_is_flat_beside_a_hundred_agents__peers_31(tmp_path: Path, soak_s: float) -> None:
    async with busy_fleet(tmp_path, AGENTS) as fleet:
        await fleet.live(WARM_UP_S)
        before = fleet.router.rss_bytes
        await fleet.live(soak_s)
        after = fleet.router.rss_bytes
        print(f"RSS {before / 2**20:.1f} MiB, {soak_s:g} s later {after / 2**20:.1f} MiB")
        assert after < (1 + GROWTH) * before
        report = await fleet.router.report()
        assert len([view for view in report.replicas if view.usable and view.mode == "precise"]) == AGENTS
