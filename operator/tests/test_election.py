"""Leadership: one at a time, whatever clocks and the API server do. Time is the event loop's, compressed."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from prefixpool_operator.election import Elector, LeadershipLostError, LeaseTerms
from prefixpool_operator.kube import LEASE, ForbiddenError, UnavailableError
from prefixpool_testing.fake_kube import FakeKube

TERMS = LeaseTerms(duration_s=15, renew_s=10, retry_s=2)
LONG_AGO = datetime(2001, 1, 1, tzinfo=UTC)

pytestmark = pytest.mark.looptime(start=0)


def elector(api: FakeKube, identity: str, *, skew: timedelta = timedelta()) -> Elector:
    clock = asyncio.get_running_loop().time
    return Elector(
        api,
        namespace="ns",
        name="lease",
        identity=identity,
        terms=TERMS,
        clock=clock,
        now=lambda: LONG_AGO + skew + timedelta(seconds=clock()),
        draw=lambda: 0.5,
    )


def holder(api: FakeKube) -> str:
    return str(api.objects["Lease", "ns", "lease"]["spec"]["holderIdentity"])


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_the_first_one_leads_and_renews_for_as_long_as_it_lives() -> None:
    api = FakeKube()
    first = elector(api, "first")
    await first.acquire()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(300):
            await first.hold()
    assert first.leads()
    assert holder(api) == "first"
    assert api.objects["Lease", "ns", "lease"]["spec"]["leaseTransitions"] == 0


async def test_a_second_one_waits_and_leads_at_once_after_a_release() -> None:
    api = FakeKube()
    first, second = elector(api, "first"), elector(api, "second")
    await first.acquire()
    holding, waiting = asyncio.create_task(first.hold()), asyncio.create_task(second.acquire())
    await asyncio.sleep(60)
    assert not waiting.done()
    holding.cancel()
    await first.release()
    assert not first.leads()
    released_at = now()
    await waiting
    assert now() - released_at <= 2 * TERMS.retry_s
    assert holder(api) == "second"
    assert api.objects["Lease", "ns", "lease"]["spec"]["leaseTransitions"] >= 1


@pytest.mark.parametrize("skew", [timedelta(days=-3650), timedelta(0), timedelta(days=3650)])
async def test_a_dead_leader_is_followed_after_its_lease_as_seen_by_the_follower(skew: timedelta) -> None:
    """The wall clocks of the two differ by years, which changes nothing."""
    api = FakeKube()
    await elector(api, "dead").acquire()
    await asyncio.sleep(14)  # the follower has not seen any of this
    started_at = now()
    await elector(api, "next", skew=skew).acquire()
    assert TERMS.duration_s <= now() - started_at <= TERMS.duration_s + 2 * TERMS.retry_s


async def test_a_leader_that_cannot_renew_gives_up_before_another_may_start() -> None:
    api = FakeKube()
    first, second = elector(api, "first"), elector(api, "second")
    await first.acquire()
    waiting = asyncio.create_task(second.acquire())
    holding = asyncio.create_task(first.hold())
    await asyncio.sleep(30)
    broken_at = now()
    api.fail = lambda verb, kind, name: UnavailableError("down")
    with pytest.raises(LeadershipLostError, match="could not be renewed for 10 s"):
        await holding
    lost_at = now()
    assert TERMS.renew_s - TERMS.retry_s <= lost_at - broken_at <= TERMS.renew_s + TERMS.retry_s
    assert not first.leads()
    api.fail = lambda verb, kind, name: None
    await waiting
    assert now() > lost_at
    assert holder(api) == "second"


async def test_a_server_that_never_answers_ends_leadership_in_time() -> None:
    api = FakeKube()
    first = elector(api, "first")
    await first.acquire()

    async def never(*_: object) -> dict[str, object]:
        await asyncio.Event().wait()
        raise AssertionError

    api.get = never  # type: ignore[method-assign]
    with pytest.raises(LeadershipLostError):
        await first.hold()
    assert now() <= TERMS.renew_s + TERMS.retry_s


async def test_a_leader_that_slept_too_long_no_longer_leads() -> None:
    """A stopped process, or a loop that hung: the first thing it learns is that its time is over."""
    first = elector(FakeKube(), "first")
    await first.acquire()
    assert first.leads()
    await asyncio.sleep(TERMS.renew_s)
    assert not first.leads()


async def test_a_leader_whose_lease_was_taken_gives_up_at_once() -> None:
    api = FakeKube()
    first = elector(api, "first")
    await first.acquire()
    api.objects["Lease", "ns", "lease"]["spec"]["holderIdentity"] = "other"
    with pytest.raises(LeadershipLostError, match="another holder"):
        await first.hold()
    assert now() <= TERMS.retry_s
    assert holder(api) == "other"


async def test_of_two_that_ask_at_the_same_time_one_leads() -> None:
    """The second one's write names a version that is no longer there."""
    api = FakeKube()
    api.put(LEASE, "lease", spec={"holderIdentity": ""})
    both = [elector(api, "a"), elector(api, "b")]
    read, real_get = asyncio.Barrier(2), api.get

    async def get_together(*args: object) -> dict[str, object]:
        found = await real_get(*args)  # type: ignore[arg-type]
        await read.wait()
        return found

    api.get = get_together  # type: ignore[method-assign]
    tasks = [asyncio.create_task(one.acquire()) for one in both]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert [one.leads() for one in both].count(True) == 1
    assert holder(api) == ("a" if both[0].leads() else "b")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_release_that_fails_is_no_error() -> None:
    api = FakeKube()
    first = elector(api, "first")
    await first.acquire()
    api.fail = lambda verb, kind, name: UnavailableError("down")
    await first.release()
    assert not first.leads()


async def test_a_lease_that_cannot_be_read_is_told_until_it_can() -> None:
    api = FakeKube()
    api.fail = lambda verb, kind, name: ForbiddenError("leases is forbidden")
    first = elector(api, "first")
    waiting = asyncio.create_task(first.acquire())
    await asyncio.sleep(1)
    assert "leases is forbidden" in first.problem
    api.fail = lambda verb, kind, name: None
    await waiting
    assert first.problem == ""
