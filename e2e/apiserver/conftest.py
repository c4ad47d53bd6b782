"""A real API server, without nodes: one for all tests of a session, and an empty namespace for each test."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest

from prefixpool_testing.cluster.api_server import ApiServer, api_server


@pytest.fixture(scope="session")
def cluster_api() -> Iterator[ApiServer]:
    """Started once. Its logs are shown when it can't be."""
    with api_server() as api:
        yield api


@pytest.fixture
def namespace(cluster_api: ApiServer) -> Iterator[str]:
    """A namespace of the test's own, deleted behind it."""
    name = f"test-{uuid4().hex[:8]}"
    cluster_api.kubectl("create", "namespace", name)
    yield name
    cluster_api.kubectl("delete", "namespace", name, "--wait=false")
