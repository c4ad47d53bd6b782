"""Drain: the order of its steps, its deadlines, and what may be undone."""

from __future__ import annotations

import asyncio

import pytest

from prefixpool.wire import DrainPhase, DrainRequest
from prefixpool_agent.drain import Drain, DrainRefusedError, Plan, View, advance, begin
from prefixpool_agent.supervisor_client import SupervisorError


def plan(**changes: object) -> Plan:
    return begin(DrainRequest(timeout_s=30.0), 100.0, ack_s=2.0)._replace(**changes)


@pytest.mark.parametrize(
    ("start", "view", "phase"),
    [
        (DrainPhase.FENCING, View(100.5, 3, 1), DrainPhase.FENCING),  # a router may still send
        (DrainPhase.FENCING, View(100.5, 3, 0), DrainPhase.WAITING),  # all routers know
        (DrainPhase.FENCING, View(102.0, 3, 1), DrainPhase.WAITING),  # or had their time
        (DrainPhase.FENCING, View(100.0, 0, 0), DrainPhase.STOPPING),  # nothing to wait for
        (DrainPhase.WAITING, View(110.0, 1, 0), DrainPhase.WAITING),
        (DrainPhase.WAITING, View(110.0, 0, 0), DrainPhase.STOPPING),
        (DrainPhase.WAITING, View(130.0, 1, 0), DrainPhase.STOPPING),
    ],
)
def test_step(start: DrainPhase, view: View, phase: DrainPhase) -> None:
    assert advance(plan(phase=start), view).phase is phase


def test_deadline_with_running_requests_is_forced_and_says_how_many() -> None:
    after = advance(plan(phase=DrainPhase.WAITING), View(130.0, 4, 0))
    assert after.forced
    assert after.reason == "4 requests were still running at the deadline"


def test_without_stop_a_drain_ends_fenced() -> None:
    fence_only = begin(DrainRequest(stop=False), 0.0, 2.0)
    assert advance(fence_only, View(0.1, 0, 0)).phase is DrainPhase.DONE


def test_acknowledgements_are_not_awaited_beyond_the_drain_itself() -> None:
    assert begin(DrainRequest(timeout_s=0.5), 10.0, ack_s=2.0).ack_until_s == 10.5


class World:
    """Records what a drain does; requests and routers are set by the test."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.inflight = 1
        self.unacknowledged = 1
        self.stop_error: Exception | None = None

    def fence(self, on: bool) -> None:
        self.did.append("fence" if on else "lift")

    def view(self, now_s: float) -> View:
        return View(now_s, self.inflight, self.unacknowledged)

    async def stop_engine(self) -> None:
        self.did.append("stop")
        if self.stop_error is not None:
            raise self.stop_error

    async def clean(self) -> None:
        self.did.append("clean")

    def phase_changed(self, phase: DrainPhase) -> None:
        self.did.append(phase.value)


ORDER = ["fencing", "fence", "waiting", "stopping", "stop", "cleaning", "clean", "done"]


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.looptime
async def test_whole_drain_in_order(world: World) -> None:
    drain = Drain(world, ack_s=2.0, clock=asyncio.get_running_loop().time)
    drain.start(DrainRequest(timeout_s=30.0))
    await asyncio.sleep(1.0)
    assert drain.status().phase is DrainPhase.FENCING
    world.unacknowledged = 0
    await asyncio.sleep(0.2)
    assert drain.status().phase is DrainPhase.WAITING
    assert drain.status().remaining_s == pytest.approx(28.8, abs=0.2)
    world.inflight = 0
    status = await drain.wait()
    assert (status.phase, status.forced, status.reason) == (DrainPhase.DONE, False, "all requests ended")
    assert world.did == ORDER


@pytest.mark.looptime
async def test_posting_twice_runs_one_drain(world: World) -> None:
    drain = Drain(world, ack_s=2.0, clock=asyncio.get_running_loop().time)
    drain.start(DrainRequest(timeout_s=5.0))
    await asyncio.sleep(3.0)
    assert drain.start(DrainRequest(timeout_s=500.0)).remaining_s < 3.0
    assert (await drain.wait()).forced
    assert drain.start(DrainRequest()).phase is DrainPhase.DONE
    assert world.did == ORDER


@pytest.mark.looptime
async def test_lifting_accepts_requests_again(world: World) -> None:
    drain = Drain(world, ack_s=2.0, clock=asyncio.get_running_loop().time)
    drain.start(DrainRequest(stop=False))
    assert drain.lift().phase is DrainPhase.NONE
    await asyncio.sleep(100)
    assert world.did == ["fencing", "fence", "lift", "none"]


@pytest.mark.looptime
async def test_a_stopped_engine_cannot_be_lifted(world: World) -> None:
    world.inflight = world.unacknowledged = 0
    drain = Drain(world, ack_s=2.0, clock=asyncio.get_running_loop().time)
    drain.start(DrainRequest())
    await drain.wait()
    with pytest.raises(DrainRefusedError):
        drain.lift()


@pytest.mark.looptime
async def test_fence_only_drain_may_be_asked_to_stop_later(world: World) -> None:
    world.inflight = world.unacknowledged = 0
    drain = Drain(world, ack_s=2.0, clock=asyncio.get_running_loop().time)
    drain.start(DrainRequest(stop=False))
    assert (await drain.wait()).phase is DrainPhase.DONE
    drain.start(DrainRequest(stop=True))
    await drain.wait()
    assert world.did[-4:] == ["stop", "cleaning", "clean", "done"]


@pytest.mark.looptime
async def test_supervisor_that_does_not_answer_is_in_the_status(world: World) -> None:
    world.inflight = world.unacknowledged = 0
    world.stop_error = SupervisorError("supervisor: no answer")
    drain = Drain(world, ack_s=2.0, clock=asyncio.get_running_loop().time)
    drain.start(DrainRequest())
    status = await drain.wait()
    assert status.phase is DrainPhase.DONE
    assert "no answer" in status.reason


@pytest.mark.looptime
async def test_a_drain_that_could_not_stop_the_engine_could_neither_be_lifted_nor_tried_again(world: World) -> None:
    world.inflight = world.unacknowledged = 0
    world.stop_error = SupervisorError("supervisor: no answer")
    drain = Drain(world, ack_s=2.0, clock=asyncio.get_running_loop().time)
    drain.start(DrainRequest())
    await drain.wait()
    assert drain.lift().phase is DrainPhase.NONE
    assert world.did[-2:] == ["lift", "none"]
    for attempt in range(2):
        drain.start(DrainRequest())
        status = await drain.wait()
        assert ("stopping failed" in status.reason) is (attempt == 0)
        world.stop_error = None
    assert world.did[-4:] == ["stop", "cleaning", "clean", "done"]
    with pytest.raises(DrainRefusedError):
        drain.lift()


@pytest.mark.looptime
async def test_engine_that_was_started_again_ends_the_drain_that_stopped_it(world: World) -> None:
    world.inflight = world.unacknowledged = 0
    drain = Drain(world, ack_s=2.0, clock=asyncio.get_running_loop().time)
    drain.start(DrainRequest())
    await drain.wait()
    drain.forget()
    assert not drain.active


@pytest.mark.looptime
async def test_fence_outlives_an_engine_that_crashes_behind_it(world: World) -> None:
    drain = Drain(world, ack_s=2.0, clock=asyncio.get_running_loop().time)
    world.inflight = world.unacknowledged = 0
    drain.start(DrainRequest(stop=False))
    await drain.wait()
    drain.forget()
    assert drain.active
