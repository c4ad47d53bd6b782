"""A whole one-node Kubernetes with the product in it, for all tests. What a failed one leaves is in build/e2e/."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from prefixpool_testing.cluster import images
from prefixpool_testing.cluster.node import Node, node
from prefixpool_testing.cluster.product import PoolPlace, install, pool_place

OUT = Path(__file__).parents[2] / "build/e2e"


@pytest.fixture(scope="session")
def cluster() -> Iterator[Node]:
    """Minutes, the first time on a machine: programs and images are built."""
    with node(images.archive()) as running:
        try:
            install(running)
        except BaseException:
            running.collect(OUT / "install")
            raise
        yield running


@pytest_asyncio.fixture
async def place(cluster: Node, request: pytest.FixtureRequest) -> AsyncIterator[PoolPlace]:
    """A namespace of the test's own."""
    async with pool_place(cluster) as own:
        yield own
        report = request.node.stash.get(_CALL, None)
        if report is not None and report.failed:
            cluster.collect(OUT / request.node.name)


_CALL = pytest.StashKey[pytest.TestReport]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fixtures can see how the test went."""
    report = yield
    if report.when == "call":
        item.stash[_CALL] = report
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Starting the cluster counts as time of the first test."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(1800))
