"""Load: at once, not too often, never silent; and a backlog that returns to zero."""

from __future__ import annotations

import asyncio

import pytest

from prefixpool.wire import HEARTBEAT_S, LOAD_INTERVAL_S, Load
from prefixpool_agent.load import Backlog, LoadReporter


class Meter:
    def __init__(self) -> None:
        self.inflight = 0
        self.sent: list[tuple[float, int]] = []

    def read(self) -> Load:
        return Load(inflight=self.inflight)

    def send(self, load: Load) -> None:
        self.sent.append((round(asyncio.get_running_loop().time(), 3), load.inflight))


@pytest.fixture
def meter() -> Meter:
    return Meter()


async def during(meter: Meter, scene: object) -> None:
    reporter = LoadReporter(meter.read, meter.send, asyncio.get_running_loop().time)
    task = asyncio.create_task(reporter.run())
    await scene(reporter)  # type: ignore[operator]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.looptime
async def test_silence_means_a_dead_agent_so_there_is_a_heartbeat(meter: Meter) -> None:
    await during(meter, lambda reporter: asyncio.sleep(5.5))
    assert len(meter.sent) == 6
    gaps = [b - a for (a, _), (b, _) in zip(meter.sent, meter.sent[1:], strict=False)]
    assert max(gaps) <= HEARTBEAT_S + LOAD_INTERVAL_S


@pytest.mark.looptime
async def test_change_is_sent_at_once(meter: Meter) -> None:
    async def scene(reporter: LoadReporter) -> None:
        await asyncio.sleep(0.52)
        meter.inflight = 3
        reporter.nudge()
        await asyncio.sleep(0.001)
        assert meter.sent[-1] == (0.52, 3)

    await during(meter, scene)


@pytest.mark.looptime
async def test_change_without_a_note_is_seen_within_the_interval(meter: Meter) -> None:
    async def scene(reporter: LoadReporter) -> None:
        await asyncio.sleep(0.52)
        meter.inflight = 3
        await asyncio.sleep(LOAD_INTERVAL_S + 0.001)
        assert meter.sent[-1][1] == 3

    await during(meter, scene)


@pytest.mark.looptime
async def test_a_thousand_changes_a_second_are_twenty_messages(meter: Meter) -> None:
    async def scene(reporter: LoadReporter) -> None:
        for _ in range(1000):
            meter.inflight += 1
            reporter.nudge()
            await asyncio.sleep(0.001)

    await during(meter, scene)
    assert len(meter.sent) <= 1.0 / LOAD_INTERVAL_S + 1


def test_backlog_is_the_uncached_part() -> None:
    backlog = Backlog()
    backlog.arrived("a", body_bytes=4000, predicted_tokens=600)
    assert backlog.tokens == 400
    backlog.stored("a", 256)
    assert backlog.tokens == 144
    backlog.stored("a", 256)
    assert backlog.tokens == 0
    backlog.ended("a")
    backlog.ended("a")
    assert backlog.tokens == 0


def test_backlog_learns_how_many_bytes_a_token_has() -> None:
    backlog = Backlog()
    for _ in range(200):
        backlog.learned(body_bytes=2000, prompt_tokens=1000)
    backlog.arrived("a", 2000, 0)
    assert backlog.tokens == pytest.approx(1000, rel=0.01)


def test_backlog_is_bounded_and_stays_consistent() -> None:
    backlog = Backlog()
    for i in range(10_000):
        backlog.arrived(str(i), 400, 0)
    assert backlog.tokens == 4096 * 100
    for i in range(10_000):
        backlog.ended(str(i))
    assert backlog.tokens == 0
