"""Two operators, one Lease, on a real API server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import pytest_asyncio

from prefixpool_operator import kube
from prefixpool_testing.cluster.api_server import ApiServer
from prefixpool_testing.eventually import eventually
from prefixpool_testing.operated import Place
from prefixpool_testing.operator_program import NAMESPACE, OperatorProgram

pytestmark = pytest.mark.asyncio(loop_scope="module")

DURATION_S = 4.0
FLAGS = ("--lease-duration-s", "4", "--lease-renew-s", "3", "--lease-retry-s", "0.5", "--resync-s", "5")


class Two(NamedTuple):
    """`leader` leads, `standby` waits."""

    leader: OperatorProgram
    standby: OperatorProgram
    holder: str  # what the Lease calls the leader, and its requests their sender


@pytest.fixture
def lease(request: pytest.FixtureRequest) -> str:
    return f"lease-{abs(hash(request.node.name)) % 10**8}"


@pytest.fixture
def programs(api: ApiServer, lease: str) -> Iterator[list[OperatorProgram]]:
    both = [OperatorProgram(api, f"operator-{name}", *FLAGS, "--lease-name", lease) for name in "ab"]
    for one in both:
        one.start()
    yield both
    for one in both:
        one.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def two(programs: list[OperatorProgram], lease: str, place: Place) -> Two:
    async def leaders() -> list[OperatorProgram]:
        return [one for one in programs if await one.figure("leader") == 1]

    (leader,) = await eventually(leaders, within_s=60, what="one of the two leads")
    await leader.until_leading()
    (standby,) = (one for one in programs if one is not leader)

    async def waits() -> bool:
        return await standby.figure("leader") == 0

    await eventually(waits, what="the other one waits")
    held = await place.client.get(kube.LEASE, NAMESPACE, lease)
    return Two(leader, standby, held["spec"]["holderIdentity"])


async def test_a_killed_leader_is_followed_and_its_work_goes_on(place: Place, two: Two) -> None:
    await place.apply("p")
    await place.serve("p", replicas=2)
    assert await two.standby.figure("actions_total") == 0, "who waits writes nothing"
    two.leader.kill()
    await place.apply("p", replicas=3)
    await two.standby.until_leading()
    await place.serve("p", replicas=3)


async def test_a_leader_that_is_stopped_hands_over_at_once(place: Place, two: Two) -> None:
    two.leader.stop()
    lease = await place.client.list_all(kube.LEASE, NAMESPACE)
    await two.standby.until_leading()
    assert lease
    await place.apply("p", replicas=1)
    await place.serve("p", replicas=1)


async def test_a_leader_that_slept_through_its_lease_writes_nothing_and_ends(place: Place, two: Two, api: ApiServer) -> None:
    """A frozen process wakes up believing that it leads; the first thing that it does must be to find out."""
    await place.apply("p")
    await place.serve("p", replicas=2)
    two.leader.pause()
    await two.standby.until_leading()
    await place.apply("p", replicas=1)
    await place.serve("p", replicas=1)
    since_bytes = api.audit_log.stat().st_size
    two.leader.go_on()

    async def ended() -> bool:
        return two.leader.exit_status() is not None

    await eventually(ended, within_s=30, what="the old leader ends")
    assert two.leader.exit_status() == 1
    assert "leadership lost" in two.leader.log
    its_own = [one for one in api.asked() if one.user_agent.endswith(f"({two.holder})")]
    assert any(one.object_ref.namespace == place.namespace for one in its_own), "it is known by its requests"
    late = [one for one in api.asked(since_bytes) if one.user_agent.endswith(f"({two.holder})")]
    assert [one for one in late if one.writes and one.object_ref.resource != "leases"] == []
