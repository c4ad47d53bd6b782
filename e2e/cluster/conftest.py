"""A whole one-node Kubernetes with the product in it, for all tests. What a failed one leaves is below build/e2e/.

With `pytest -n` the first process has the node, and those that it starts run tests on it, each in namespaces of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from prefixpool_testing.cluster import images, phases
from prefixpool_testing.cluster.interruption import sigterm_as_ctrl_c
from prefixpool_testing.cluster.node import Node, node
from prefixpool_testing.cluster.product import PoolPlace, install, pool_place
from prefixpool_testing.cluster.removals import Removals

_CALL = pytest.StashKey[pytest.TestReport]()
_SHARED = pytest.StashKey[Node]()
_UNTIL_THE_END = pytest.StashKey[ExitStack]()


@contextmanager
def product() -> Iterator[Node]:
    """Minutes, the first time on a machine: programs and images are built."""
    archive = images.archive()
    with ExitStack() as stack:
        with phases.phase("  the node, with the product"):
            running = stack.enter_context(node(archive))
            try:
                install(running)
            except BaseException:
                running.collect(phases.out() / "install")
                raise
        yield running


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Node]:
    """This process's own, or that of the one which started it."""
    shared = getattr(request.config, "workerinput", {}).get("node")
    if shared is not None:
        yield Node.of(shared)
        return
    with product() as running:
        yield running


@pytest.fixture(scope="session")
def removals(cluster: Node) -> Iterator[Removals]:
    """Done before the cluster ends."""
    with ThreadPoolExecutor() as threads:
        begun = Removals(threads)
        yield begun
        begun.until_done()


@pytest.fixture
def nothing_leaves(removals: Removals) -> None:
    """For tests that take away what a removal needs: the kind, or the API."""
    removals.until_done()


@pytest_asyncio.fixture
async def place(cluster: Node, removals: Removals, request: pytest.FixtureRequest) -> AsyncIterator[PoolPlace]:
    """A namespace of the test's own, which is removed behind it."""
    async with pool_place(cluster) as own:
        yield own
        report = request.node.stash.get(_CALL, None)
        if report is not None and report.failed:
            cluster.collect(phases.out() / request.node.name)
        removals.submit(own.remove)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fixtures can see how the test went."""
    report = yield
    if report.when == "call":
        item.stash[_CALL] = report
    return report


def pytest_configure(config: pytest.Config) -> None:
    phases.noted(config, "e2e/cluster")
    if not hasattr(config, "workerinput"):
        sigterm_as_ctrl_c()


def pytest_sessionstart(session: pytest.Session) -> None:
    """The node, if other processes will want it; a test of this one asks for it itself."""
    config = session.config
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        config.stash[_UNTIL_THE_END] = ExitStack()
        config.stash[_SHARED] = config.stash[_UNTIL_THE_END].enter_context(product())


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A process that will run tests: what it needs to reach the node."""
    node.workerinput["node"] = node.config.stash[_SHARED].to_share()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("alone") and hasattr(item.config, "workerinput"):
        pytest.fail("it changes what other tests stand on: run it without -n")


@pytest.hookimpl(trylast=True)  # when the others have ended
def pytest_sessionfinish(session: pytest.Session) -> None:
    if (stack := session.config.stash.get(_UNTIL_THE_END, None)) is not None:
        stack.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Starting the cluster counts as time of the first test. The longest first, so that none is left over at the end."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(1800))
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
