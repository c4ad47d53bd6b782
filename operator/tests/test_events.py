"""Events of a pool: posted once, counted after that, and nothing hangs on them."""

from __future__ import annotations

from prefixpool_operator import kube
from prefixpool_operator.actions import Event, EventType
from prefixpool_operator.events import EventPoster
from prefixpool_operator.kube import ForbiddenError
from prefixpool_testing.fake_kube import FakeKube

SIZED = Event(type=EventType.NORMAL, reason="Sized", message="3 replicas")


async def test_the_same_event_is_counted_by_whichever_process_says_it() -> None:
    api = FakeKube()
    pool = api.put(kube.POOL, "p")
    await EventPoster(api, leads=lambda: True, now=lambda: 0).post(pool, [SIZED])
    await EventPoster(api, leads=lambda: True, now=lambda: 3600).post(pool, [SIZED])
    (event,) = [obj for obj in api.objects.values() if obj["kind"] == "Event"]
    assert event["count"] == 2
    assert (event["firstTimestamp"], event["lastTimestamp"]) == ("1970-01-01T00:00:00Z", "1970-01-01T01:00:00Z")
    assert event["involvedObject"]["uid"] == pool["metadata"]["uid"]


async def test_another_message_or_another_pool_of_that_name_is_another_event() -> None:
    api = FakeKube()
    poster = EventPoster(api, leads=lambda: True, now=lambda: 0)
    pool = api.put(kube.POOL, "p")
    await poster.post(pool, [SIZED, Event(type=EventType.NORMAL, reason="Sized", message="4 replicas")])
    del api.objects["InferencePool", "ns", "p"]
    await poster.post(api.put(kube.POOL, "p"), [SIZED])
    assert len([obj for obj in api.objects.values() if obj["kind"] == "Event"]) == 3


async def test_a_long_message_is_cut_to_what_the_api_takes() -> None:
    api = FakeKube()
    await EventPoster(api, leads=lambda: True, now=lambda: 0).post(
        api.put(kube.POOL, "p"), [Event(type=EventType.WARNING, reason="Refused", message="x" * 5000)]
    )
    (event,) = [obj for obj in api.objects.values() if obj["kind"] == "Event"]
    assert len(event["message"]) == 1024


async def test_an_event_that_cannot_be_posted_is_no_error() -> None:
    api = FakeKube()
    pool = api.put(kube.POOL, "p")
    api.fail = lambda verb, kind, name: ForbiddenError("no right")
    await EventPoster(api, leads=lambda: True, now=lambda: 0).post(pool, [SIZED])
    assert api.writes[-1][:2] == ("create", "Event")


async def test_a_process_that_leads_no_longer_says_nothing() -> None:
    """A frozen leader once woke up and posted what it had been about to."""
    api = FakeKube()
    pool = api.put(kube.POOL, "p")
    await EventPoster(api, leads=lambda: False, now=lambda: 0).post(pool, [SIZED])
    assert [write for write in api.writes if write[1] == "Event"] == []
