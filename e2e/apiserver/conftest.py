"""A real API server, without nodes: one for all tests of a process, and an empty namespace for each test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from uuid import uuid4

import pytest
import pytest_asyncio

from prefixpool_operator.kube_client import KubeClient
from prefixpool_testing.cluster import phases
from prefixpool_testing.cluster.api_server import ApiServer, api_server
from prefixpool_testing.operated import Place
from prefixpool_testing.operator_program import admin_client, install


def pytest_configure(config: pytest.Config) -> None:
    phases.noted(config, "e2e/apiserver")


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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(api: ApiServer) -> AsyncIterator[KubeClient]:
    """With an operator's rights made, but no operator running."""
    await asyncio.to_thread(install, api)
    made = await admin_client(api)
    yield made
    await made.close()


@pytest.fixture
def place(api: ApiServer, client: KubeClient) -> Iterator[Place]:
    """A namespace for pools."""
    with Place(api, client) as made:
        yield made
