"""What a real API server refuses reaches a person, with the rights that the project ships."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from prefixpool_operator import kube
from prefixpool_operator.kube_client import KubeClient
from prefixpool_testing.cluster.api_server import ApiServer
from prefixpool_testing.operated import Place, operated

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(api: ApiServer) -> AsyncIterator[KubeClient]:
    async with operated(api, "--resync-s", "5") as (client, _):
        yield client


@pytest.fixture
def place(api: ApiServer, client: KubeClient) -> Iterator[Place]:
    with Place(api, client) as made:
        yield made


async def test_a_quota_with_room_for_one_replica(place: Place) -> None:
    await place.kubectl("create", "quota", "team", "--hard=pods=1")
    await place.apply("p", replicas=2)
    message = await place.until("p", "Degraded", "True", "PodRefused")
    assert "exceeded quota: team" in message
    await place.kubectl("delete", "quota/team")
    await place.serve("p", replicas=2)
    await place.until("p", "Degraded", "False", "Healthy")


async def test_a_child_that_the_api_server_does_not_take(place: Place) -> None:
    await place.apply("p", placement={"affinity": {"nodeAffinity": 7}})
    message = await place.until("p", "Degraded", "True", "WriteRefused")
    assert "nodeAffinity" in message
    await place.apply("p")
    await place.serve("p", replicas=2)
    await place.until("p", "Degraded", "False", "Healthy")


async def test_a_secret_with_the_name_of_the_pools_keys(place: Place) -> None:
    await place.kubectl("create", "secret", "generic", "p-keys", "--from-literal=engine=theirs")
    await place.apply("p")
    assert "Secret p-keys" in await place.until("p", "Accepted", "False", "NameTaken")
    assert await place.pods("p") == []
    await place.kubectl("delete", "secret/p-keys")
    await place.until("p", "Accepted", "True", within_s=60)
    secret = await place.get(kube.SECRET, "p-keys")
    assert secret is not None
    assert secret["data"].keys() == {"engine", "salt"}
