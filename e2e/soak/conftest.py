"""Long forms of the behaviour tests (`make soak`). Each takes SOAK_S seconds, five minutes if that is not set."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from prefixpool_testing.sim_pool import PoolOptions, SimPool, started


@pytest.fixture(scope="session")
def soak_s() -> float:
    return float(os.environ.get("SOAK_S", "300"))


@pytest_asyncio.fixture
async def pool(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SimPool]:
    options: PoolOptions = getattr(request.module, "POOL", PoolOptions())
    async with started(options, tmp_path) as running:
        yield running
