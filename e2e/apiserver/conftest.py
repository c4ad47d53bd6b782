"""One real API server for all tests of this folder; tests use namespaces of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from prefixpool_testing.cluster.api_server import ApiServer, api_server


@pytest.fixture(scope="session")
def api() -> Iterator[ApiServer]:
    """Etcd, API server and controller manager; no node, so that pods are only objects."""
    with api_server() as started:
        yield started
