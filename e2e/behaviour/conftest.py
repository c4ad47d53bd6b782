"""One pool of real processes for each module of behaviour tests; a module says which by `POOL = PoolOptions(...)`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from prefixpool_testing.sim_pool import PoolOptions, SimPool, started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SimPool]:
    """Started once for the module; its tests use texts of their own, so that they do not find each other's prefixes."""
    options: PoolOptions = getattr(request.module, "POOL", PoolOptions())
    async with started(options, tmp_path_factory.mktemp("pool")) as running:
        yield running
