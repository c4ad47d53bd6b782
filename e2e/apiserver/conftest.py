"""A real API server, without nodes: one for all tests of a session, and an empty namespace for each test."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest

from prefixpool_testing.cluster.api_server import ApiServer, api_server


@pytest.fixture(scope="session")
def api() -> Iterator[ApiServer]:
    """Etcd, API server and controller manager; no node, so that pods are only objects."""
    with api_server() as started:
        yield started


@pytest.fixture
def namespace(api: ApiServer) -> Iterator[str]:
    """A namespace of the test's own, deleted behind it."""
    name = f"test-{uuid4().hex[:8]}"
    api.kubectl("create", "namespace", name)
    yield name
    api.kubectl("delete", "namespace", name, "--wait=false")
